"""Pretrain GPT with vocabulary parallelism in pipeline parallelism."""
