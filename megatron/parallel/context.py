"""Context parallelism: several ranks share every sequence, and only attention notices.

Outside of attention the c ranks of the context axis behave as replicas do: each has its own tokens,
all have the same parameters, and their gradients add up. Within attention a token needs the keys
and values of all earlier ones, so the ranks gather them (``megatron.layers.context_attention``).

A sequence is cut into 2c chunks, and rank k has chunks k and 2c - 1 - k, as in Megatron. An early
chunk sees few keys and a late one many, so that all ranks have the same work.

Shapes: b batch, s tokens of a sequence, u = s / c tokens that a rank has, k tokens of a chunk,
z = 2c chunks.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis


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


@dataclass(frozen=True)
class ContextParallel:
    """How a rank shares sequences; all ranks of the axis call its methods in the same order.

    Attributes:
        axis: the context axis, with a process group that only attention uses.
    """

    axis: ConnectedAxis

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
        parts_cxbu = collectives.all_gather(x_xbu, self.axis)
        early_cxbk, late_cxbk = parts_cxbu.chunk(2, dim=3)
        return torch.cat((*early_cxbk, *reversed(late_cxbk.unbind())), dim=2)

    def reduce(self, partial_xbs: Tensor) -> Tensor:
        """Return the sum of the ranks' summands for this rank's tokens, the adjoint of ``gather``.

        Args:
            partial_xbs: this rank's summand, [x, b, s, ...].

        Returns:
            [x, b, u, ...].
        """
        chunks = partial_xbs.chunk(2 * self.size, dim=2)
        by_rank = [
            chunks[chunk] for rank in range(self.size) for chunk in chunks_of(rank, self.size)
        ]
        parts_zxbk = torch.stack(by_rank)
        collectives.reduce_scatter(parts_zxbk.view(-1), self.axis)
        return torch.cat(parts_zxbk.chunk(self.size)[self.rank].unbind(), dim=2)


WHOLE_SEQUENCES: Final = ContextParallel(ConnectedAxis("context", 0, (0,)))
"""A rank that has all tokens of its sequences, c = 1."""
