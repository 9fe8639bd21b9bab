"""Imports weights from Hugging Face's form and Megatron-Core, exports to Hugging Face's form."""
