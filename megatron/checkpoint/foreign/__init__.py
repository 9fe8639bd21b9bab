"""Weights of other programs: import from and export to Hugging Face, import from Megatron-Core."""
