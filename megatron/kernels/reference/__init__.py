"""The specification: every operation in PyTorch, for any device and type."""
