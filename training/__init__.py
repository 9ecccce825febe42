"""Make the embedded members: generate the texts that they learn from, and train them.

world          the generated world: names, facts, passages, questions
dialogues      an agent's tools, messages and replies, in the two forms that the members know
recipes        what each member learns: the emphasis of each part of its training
layouts        where the passages and the question stand in a prompt
packing        packs: the tokens of one prompt and of many questions that branch off it
batches        packs as tensors
schedule       the steps, learning rates and difficulty of the parts of training
muon           the optimizer of the weight matrices
trainer        trains one member
train          the command: ``python -m training.train``
"""
