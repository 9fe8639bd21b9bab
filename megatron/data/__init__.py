"""Tokenizers, indexed token files, GPT samples, microbatches. Knows nothing of ranks."""
