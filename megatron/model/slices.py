"""Lengths of the slices into which microbatches are cut along their sequence."""

from itertools import pairwise
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from megatron.model.config import ModelConfig
from megatron.model.flops import token_flops

SplitStrategy: TypeAlias = Literal["uniform", "balanced"]
"""Slices of equally many tokens, or of equally many FLOPs in the layers."""

BALANCED_MULTIPLE: Final = 128
"""Tokens whose multiples are lengths of balanced slices, so that kernels have whole tiles."""


def slice_lengths(config: ModelConfig, slices: int, strategy: SplitStrategy) -> tuple[int, ...]:
    """Return the tokens of every slice of a sample, in the order of the sequence.

    Raises:
        ValueError: the sequence cannot be cut so; the message names the flags.
    """
    multiple = BALANCED_MULTIPLE if strategy == "balanced" and slices > 1 else 1
    length = config.seq_length
    if strategy == "uniform" and length % slices:
        raise ValueError(
            f"--num-seq-splits {slices} does not divide --seq-length {length}: slices have equally "
            "many tokens, so choose a divisor"
        )
    if length % multiple or length < slices * multiple:
        raise ValueError(
            f"--seq-split-strategy balanced with --seq-length {length}: it makes {slices} slices "
            f"(--num-seq-splits) of multiples of {multiple} tokens; choose a longer multiple of "
            f"{multiple}, or uniform"
        )
    if strategy == "uniform":
        return (length // slices,) * slices
    return balanced_lengths(token_flops(config), slices, multiple)


def balanced_lengths(flops_s: Tensor, slices: int, multiple: int) -> tuple[int, ...]:
    """Return lengths of slices, multiples of ``multiple``, whose FLOPs are as equal as possible.

    Every end is the multiple that is closest to an equal share of all FLOPs, float64 [s].
    """
    length, sums_s = len(flops_s), flops_s.cumsum(0)
    ends = [0]
    for number in range(1, slices):
        share = sums_s[-1] * number / slices
        end = round(int(torch.searchsorted(sums_s, share)) / multiple) * multiple
        left = (slices - number) * multiple
        ends.append(min(max(end, ends[-1] + multiple), length - left))
    return tuple(end - first for first, end in pairwise([*ends, length]))
