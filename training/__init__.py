"""Make the embedded members: their world, their dialogues and their training."""
