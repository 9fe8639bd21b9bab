"""A small Llama for runs in 8 bits, and the configuration of such a run."""

from dataclasses import replace
from typing import Final

import torch
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.run.run_config import RunConfig

LLAMA: Final = GPTOptions(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    vocab_size=61,
    normalization="RMSNorm",
    swiglu=True,
    position_embedding_type="rope",
    add_bias_linear=False,
    tie_embeddings=False,
)


def config_of(
    job: Job,
    layout: Layout,
    eight_bits: EightBitSettings | None,
    dtype: torch.dtype = torch.float32,
) -> RunConfig:
    """Return the configuration of a job whose layers multiply in 8 bits; ``None``: they do not."""
    config = job.config(layout, dtype)
    return replace(config, train=replace(config.train, eight_bits=eight_bits))
