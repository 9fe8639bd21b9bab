"""The arguments of one call of attention besides its queries, keys and values.

Every way to attend takes the same ``AttentionCall`` and reads what it needs there, so that a new
argument of attention changes no signature in between.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

from megatron.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from megatron.kernels.face import Kernels
from megatron.kernels.heads import alone
from megatron.layers.slice_attention import seen_keys
from megatron.layers.slices import SlicedPass

Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Queries [b, u, a, d], keys [b, u, g, d] and values of the same u tokens; queries and keys are
rotated by the tokens' true positions."""


@dataclass(frozen=True)
class AttentionCall:
    """How some heads attend.

    Attributes:
        kernels: compute attention.
        options: of all query heads and of whole samples. The mask of dropout depends on the number
            of ranks that share sequences, and on the slices.
        sliced: the slice that the tokens are in; ``None``: they are in whole samples.
        layer: index of the layer in the whole model, for slices.
    """

    kernels: Kernels
    options: AttentionOptions = PLAIN_ATTENTION
    sliced: SlicedPass | None = None
    layer: int = -1

    def of_heads(self, first: int, number: int) -> "AttentionCall":
        """Return the call for ``number`` query heads, starting with head ``first``."""
        return replace(self, options=self.options.of_heads(first, number))

    @property
    def window(self) -> int | None:
        """Positions before its own that a query is given; ``None``: all, as documents need them."""
        return None if self.options.documents else self.options.scores.window

    def seen(self, q_buad: Tensor, k_bzgd: Tensor, v_bzgd: Tensor) -> Tensor:
        """Return attention, [b, u, a, d], of queries that see z keys, the last u their own."""
        return self.kernels.causal_attention(
            q_buad.transpose(1, 2),
            k_bzgd.transpose(1, 2),
            v_bzgd.transpose(1, 2),
            options=self.options,
        ).transpose(1, 2)

    def of_all_tokens(self, heads: Heads) -> Tensor:
        """Return attention, [b, u, a, d], of heads of which this rank has all tokens.

        The tokens are those of a slice, or of whole samples.
        """
        sliced = self.sliced
        if sliced is None:
            return self.seen(*heads)
        q_buad, *own = heads
        keys = seen_keys(sliced, self.layer, own, [sliced.part], self.window)
        return self.seen(alone(q_buad), *keys)
