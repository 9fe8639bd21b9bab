"""The question of the command ``plan``: a model, GPUs, a batch, and how long to train."""
