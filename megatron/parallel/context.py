"""Context parallelism: several ranks share every sequence, and only attention notices.

Outside of attention the c ranks of the context axis behave as replicas do: each has its own tokens,
all have the same parameters, and their gradients add up. Within attention a token needs the keys
and values of all earlier tokens. There are four ways to get them there: the ranks gather keys and
values, or pass them on along a ring; or every rank attends for all tokens with its share of the
heads; or sets of neighbours share heads, and the sets make a ring
(``megatron.layers.context_attention``).

A sequence is cut into 2c chunks, and rank k has chunks k and 2c - 1 - k, as in Megatron. An early
chunk sees few keys and a late chunk many. So all ranks have the same work.

Shapes: b batch, s tokens of a sequence, u = s / c tokens that a rank has, k tokens of a chunk,
z = 2c chunks, a heads, d channels of a head, w features of several tensors side by side.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.lanes import InlineLane, Lane, Pending
from megatron.parallel.waits import Awaited

ContextExchange: TypeAlias = Literal["all_gather", "p2p", "a2a", "a2a+p2p"]
"""How attention sees all tokens: ranks gather keys and values, pass them on along a ring during
attention, exchange heads for tokens, or exchange heads with their neighbours and pass keys and
values on from one set of neighbours to the next."""


class ExchangeFacts(NamedTuple):
    """The facts about an exchange that code outside of attention asks for.

    Attributes:
        has_ring: keys and values pass along a ring of ranks. A ring forms the probabilities part by
            part, so nothing may be dropped, and it passes on keys of a pass's own tokens only.
        has_heads: ranks exchange heads for tokens. An exchange with both has two levels.
    """

    has_ring: bool = False
    has_heads: bool = False

    @property
    def in_levels(self) -> bool:
        """Whether sets of neighbours exchange heads, and the sets make a ring."""
        return self.has_ring and self.has_heads


CONTEXT_EXCHANGES: Final[Mapping[ContextExchange, ExchangeFacts]] = {
    "all_gather": ExchangeFacts(),
    "p2p": ExchangeFacts(has_ring=True),
    "a2a": ExchangeFacts(has_heads=True),
    "a2a+p2p": ExchangeFacts(has_ring=True, has_heads=True),
}


class ContextAxes(NamedTuple):
    """The ranks that share sequences.

    Attributes:
        all: all of them.
        heads: in two levels, those that exchange heads.
        ring: in two levels, those that make a ring.
    """

    all: ConnectedAxis
    heads: ConnectedAxis
    ring: ConnectedAxis


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return the two chunks, of 2 ``size``, that a rank of the context axis has."""
    return rank, 2 * size - 1 - rank


def own_positions(seq_length: int, rank: int, size: int) -> Tensor:
    """Return the positions of a rank's tokens in their sequence, ascending, int64 [u].

    Args:
        seq_length: s, a multiple of 2 ``size`` unless ``size`` is 1.
        rank: place on the context axis.
        size: ranks of the axis.
    """
    if size == 1:
        return torch.arange(seq_length)
    chunks_xk = torch.arange(seq_length).view(2 * size, -1)
    return chunks_xk[list(chunks_of(rank, size))].flatten()


def own_positions_in_slices(lengths: Sequence[int], rank: int, size: int) -> Tensor:
    """Return the positions of a rank's tokens, ascending, if it has its part of every slice.

    Args:
        lengths: tokens of the slices of a sample, in the order of the sequence; each is cut as a
            sequence of its own would be.
        rank: place on the context axis.
        size: ranks of the axis.
    """
    firsts = accumulate(lengths, initial=0)
    parts = zip(firsts, lengths, strict=False)
    return torch.cat([first + own_positions(length, rank, size) for first, length in parts])


@dataclass(frozen=True)
class ContextParallel:
    """How a rank shares sequences; all ranks of the axis call its methods in the same order.

    Attributes:
        axis: the context axis, with a process group that only attention uses.
        exchange: how attention sees all tokens.
        lane: where keys and values travel along the ring, during attention.
        levels: in two levels, the ranks that exchange heads and the ranks of the ring. The first
            have neighbouring chunks, so that together they have two chunks of the ring's.
    """

    axis: ConnectedAxis
    exchange: ContextExchange = "all_gather"
    lane: Lane = field(default_factory=InlineLane)
    levels: "tuple[ContextParallel, ContextParallel] | None" = None

    @property
    def rank(self) -> int:
        """This rank's place cp on the axis."""
        return self.axis.rank

    @property
    def size(self) -> int:
        """Ranks c of the axis."""
        return self.axis.size

    def own_tokens(self, x_bsh: Tensor) -> Tensor:
        """Return this rank's tokens, [b, u, ...], from a tensor with all tokens, [b, s, ...]."""
        if self.size == 1:
            return x_bsh
        chunks = x_bsh.chunk(2 * self.size, dim=1)
        return torch.cat([chunks[chunk] for chunk in chunks_of(self.rank, self.size)], dim=1)

    def gather(self, x_xbu: Tensor) -> Tensor:
        """Return all tokens in order, [x, b, s, ...], from the parts of all ranks.

        Args:
            x_xbu: [x, b, u, ...], contiguous; x tensors travel together.
        """
        return _in_order(collectives.all_gather(x_xbu, self.axis), dim=2)

    def reduce(self, partial_xbs: Tensor) -> Tensor:
        """Return the sum of the ranks' summands for this rank's tokens, the adjoint of ``gather``.

        Args:
            partial_xbs: this rank's summand, [x, b, s, ...].

        Returns:
            [x, b, u, ...].
        """
        parts_zxbk = self._by_rank(partial_xbs, dim=2)
        collectives.reduce_scatter(parts_zxbk.view(-1), self.axis)
        return torch.cat(parts_zxbk.chunk(self.size)[self.rank].unbind(), dim=2)

    def to_heads(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Give every rank all tokens of its share of the heads (Ulysses, arXiv 2309.14509).

        Args:
            own: for each tensor all heads of this rank's tokens, [b, u, a, d]; a is a multiple of c
                and, like d, may differ between the tensors, which travel together.

        Returns:
            For each tensor this rank's heads of all tokens in order, [b, s, a / c, d].
        """
        sent_cbuw = torch.cat(
            [x_buad.unflatten(2, (self.size, -1)).movedim(2, 0).flatten(3) for x_buad in own], -1
        )
        all_bsw = _in_order(collectives.all_to_all(sent_cbuw, self.axis), dim=1)
        channels = [x_buad.shape[3] for x_buad in own]
        widths = [x_buad.shape[2] // self.size * x_buad.shape[3] for x_buad in own]
        parts = zip(all_bsw.split(widths, -1), channels, strict=True)
        return [part_bsw.unflatten(2, (-1, d)) for part_bsw, d in parts]

    def to_tokens(self, of_heads: Sequence[Tensor]) -> list[Tensor]:
        """Give every rank all heads of its tokens: the inverse and the adjoint of ``to_heads``.

        Args:
            of_heads: for each tensor this rank's heads of all tokens, [b, s, a / c, d].

        Returns:
            For each tensor all heads of this rank's tokens, [b, u, a, d].
        """
        all_bsw = torch.cat([x_bsad.flatten(2) for x_bsad in of_heads], -1)
        parts_zbkw = self._by_rank(all_bsw, dim=1)
        sent_cbuw = parts_zbkw.unflatten(0, (self.size, 2)).movedim(1, 2).flatten(2, 3)
        received_cbuw = collectives.all_to_all(sent_cbuw.contiguous(), self.axis)
        parts = received_cbuw.split([x[0, 0].numel() for x in of_heads], -1)
        return [
            part_cbuw.movedim(0, 2).unflatten(3, x_bsad.shape[2:]).flatten(2, 3)
            for part_cbuw, x_bsad in zip(parts, of_heads, strict=True)
        ]

    def pass_on(self, x: Tensor, places: int = 1) -> Pending[Tensor]:
        """Start to send ``x``, contiguous, to the rank that is ``places`` further on the ring.

        The result comes from the rank that is as many places behind.
        """
        coming = self.lane.submit(lambda: collectives.shift(x, self.axis, places))
        return Awaited(coming, self.axis.waits)

    def _by_rank(self, x: Tensor, dim: int) -> Tensor:
        """Return the chunks of ``dim`` one after the other, [z, ...]: two for every rank."""
        chunks = x.chunk(2 * self.size, dim)
        return torch.stack(
            [chunks[chunk] for rank in range(self.size) for chunk in chunks_of(rank, self.size)]
        )


def _in_order(parts: Tensor, dim: int) -> Tensor:
    """Return the tokens of all ranks' parts [c, ...] in the order of the sequence.

    Args:
        parts: each has two chunks along the dimension ``dim`` of a part.
        dim: the dimension of tokens, counted without the ranks.
    """
    early, late = parts.chunk(2, dim + 1)
    # Rank k has the chunks k and 2c - 1 - k: the late ones come in the reverse order of ranks.
    return torch.cat((*early, *reversed(late.unbind())), dim)


def context_parallel(
    axes: ContextAxes, exchange: ContextExchange, make: Callable[[int], Lane]
) -> ContextParallel:
    """Return how a rank shares sequences.

    Args:
        axes: the ranks, with process groups that only attention uses.
        exchange: how attention sees all tokens.
        make: returns a lane for a ring of so many ranks.
    """
    axis, heads, ring = axes
    facts = CONTEXT_EXCHANGES[exchange]
    if not facts.has_ring:
        return ContextParallel(axis, exchange)
    if not facts.has_heads:
        return ContextParallel(axis, exchange, make(axis.size))
    levels = ContextParallel(heads, "a2a"), ContextParallel(ring, "p2p", make(ring.size))
    return ContextParallel(axis, exchange, levels=levels)


WHOLE_SEQUENCES: Final = ContextParallel(ConnectedAxis("context", 0, (0,)))
"""A rank that has all tokens of its sequences, c = 1."""
