"""Make the embedded members: generate the texts that they learn from, and train them.

world          the generated world: names, facts, passages, questions
dialogues      an agent's tools, messages and replies, in the two forms that the members know
recipes        the architecture, vocabulary, chat template and emphasis of each member
tokenizers     trains, saves and copies the tokenizers of the members
models         a freshly initialized model of a recipe, and the optimizer of its matrices
layouts        where the passages and the question stand in a prompt
packing        packs: the tokens of one prompt and of many questions that branch off it
batches        packs as tensors
schedule       the steps, learning rates and difficulty of the parts of training
trainer        trains one member
train          the command: ``python -m training.train``
"""
