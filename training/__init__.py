"""Make the embedded members: the world they read about, the agents' dialogues, and training.

world          the generated world: names, facts, passages, questions, the handbook
dialogues      an agent's messages and replies, in the two forms that the members know
recipes        what makes each of the three members
tokenizers     trains, saves and copies their tokenizers
models         a freshly initialized model of a recipe
layouts        where the passages and the question stand in a prompt
agent_prompts  tool descriptions and system messages of agents
stages         how long and how hard the prompts are at some point of training
packing        one prompt with many questions that branch off it, as tokens
batches        packs as tensors
schedule       the parts of training and the learning rate
optimizer      the optimizer of the weight matrices
trainer        trains one member
train          the command: ``python -m training.train``
"""
