"""Causal attention for ranks that share every sequence: one row for every way to exchange tokens.

A row is a function that takes the heads of a rank's own tokens and returns their attention to the
tokens of all ranks, in the parts in which it was computed. Another way to share sequences is a file
with such a function, a row here, and a row with its facts in ``parallel.context``.
"""

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

from megatron.layers.attention_call import AttentionCall, Heads
from megatron.layers.gathered_attention import gathered_attention
from megatron.layers.ring_attention import ring_attention
from megatron.layers.ulysses_attention import ulysses_attention, ulysses_ring_attention
from megatron.parallel.context import ContextExchange, ContextParallel

_ATTENTION: Final[
    Mapping[ContextExchange, Callable[[ContextParallel, Heads, AttentionCall], tuple[Tensor, ...]]]
] = {
    "all_gather": gathered_attention,
    "p2p": ring_attention,
    "a2a": ulysses_attention,
    "a2a+p2p": ulysses_ring_attention,
}


def context_attention(
    context: ContextParallel, heads: Heads, call: AttentionCall
) -> tuple[Tensor, ...]:
    """Return causal attention of this rank's queries to the keys of all ranks.

    Args:
        context: the ranks that share the sequences.
        heads: queries, keys and values of this rank's tokens.
        call: how they attend.

    Returns:
        The attention in parts of consecutive tokens, [b, u, a, d] each, in order.
    """
    return _ATTENTION[context.exchange](context, heads, call)
