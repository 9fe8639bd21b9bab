"""Tokenizers: text to token ids and back. The types have Megatron-LM's names and ids."""
