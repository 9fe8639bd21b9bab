"""Checkpoints that any grid of ranks can load: tensors by box, folders that survive a kill."""
