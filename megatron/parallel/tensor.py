"""Tensor parallelism: how activations enter and leave layers that several ranks share.

The t ranks of the tensor axis hold each layer together. The first linear layer of attention and MLP
is cut by its outputs, the second by its inputs (arXiv 1909.08053). Between the two a rank works on
its own heads or columns and talks to nobody. In front of the first, activations *enter*: every rank
needs all tokens. After the second they *leave*: the ranks' parts are added up.

Outside of that, either every rank has all tokens, or each has its own part of the sequence
(sequence parallelism, arXiv 2205.05198). A layer asks its *strategy*, a ``TensorParallel``, to move
activations, and does not know which of the two cases holds. No method is differentiable: layers
join two methods to a forward and its backward.

Shapes: b batch, s tokens of a sequence, u tokens that a rank has outside of attention and MLP (s,
or s / t with sequence parallelism), h hidden.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from megatron.parallel import collectives
from megatron.parallel.collectives import Begun, Steps
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.lanes import Done, Lane, Pending, make_lane
from megatron.parallel.waits import Awaited


class TensorParallel:
    """A strategy; every rank of the axis calls its methods in the same order.

    This class is the strategy of a rank that holds its layers alone.

    Attributes:
        rank: this rank's place tp on the axis.
        size: ranks t of the axis.
        sequence_parts: parts of the sequence outside of attention and MLP: t with sequence
            parallelism, or 1.
    """

    rank = 0
    size = 1
    sequence_parts = 1

    @property
    def takes_turns(self) -> bool:
        """Whether the other pass of a pair may go on while tensors of these ranks are under way.

        If not, two threads would call the ranks, in an order of their own on every rank.
        """
        return True

    def gather(self, x_buh: Tensor) -> Tensor:
        """Return all tokens [b, s, h], from the parts of all ranks."""
        return x_buh

    def start_gather(self, x_buh: Tensor) -> Pending[Tensor]:
        """Begin ``gather``; it runs during the caller's work until the caller waits for it.

        The caller may begin further gatherings meanwhile, and waits for all of them in the order
        in which they began. Until then it calls no other method, except in a pair of passes.
        """
        return Done(x_buh)

    def reduce(self, partial_bsh: Tensor) -> Tensor:
        """Return the sum of the ranks' summands, for the tokens that this rank has.

        ``reduce`` is the adjoint of ``gather``, and ``gather`` the adjoint of ``reduce``.

        Args:
            partial_bsh: this rank's summand [b, s, h]; it may be changed, or be the result.

        Returns:
            [b, u, h].
        """
        return partial_bsh

    def start_reduction(self, partial_bsh: Tensor) -> Pending[Tensor]:
        """Begin ``reduce``, as ``start_gather`` begins ``gather``."""
        return Done(partial_bsh)

    def pause(self) -> None:
        """Let the other pass of a pair go on between two products of this pass."""

    def own_tokens(self, x_bsh: Tensor) -> Tensor:
        """Return this rank's tokens, [b, u, h], from a tensor that every rank has whole."""
        return x_bsh

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return [t, ...]: the ``tensor`` of every rank, by place."""
        return tensor.unsqueeze(0)

    def gather_parts(self, x_buh: Tensor) -> Tensor:
        """Return all tokens, [n, h], in the order of the ranks' parts of the sequence.

        The tokens are not put back into the order of samples. Work token by token, as in the
        vocabulary layers, needs no order.
        """
        return x_buh.flatten(0, 1)

    def reduce_parts(self, partial_nh: Tensor) -> Tensor:
        """Return the ranks' sum as ``reduce`` does, for tokens in the order of ``gather_parts``.

        Args:
            partial_nh: this rank's summand, contiguous; it may be changed, or hold the result.

        Returns:
            The tokens that this rank has, one-dimensional.
        """
        return partial_nh.view(-1)


ALONE: Final = TensorParallel()


class SharedTokens(TensorParallel):
    """Every rank has all tokens outside of attention and MLP, and does the same work on them.

    Only sums need the other ranks.

    Args:
        axis: the tensor axis, with a process group for collectives that passes wait for.
        lane: where collectives run while the same pass works. The passes of a pair begin all
            collectives themselves, so that every rank begins them in one order.
        pause: lets the other pass of a pair go on between two products; ``None``: the turns of the
            axis do.
    """

    def __init__(
        self, axis: ConnectedAxis, lane: Lane, pause: Callable[[], None] | None = None
    ) -> None:
        self.rank, self.size = axis.rank, axis.size
        self._axis = axis
        self._lane = lane
        self._pause = pause or (axis.turns.pause if axis.turns else None)
        # None stands for self: with a reference to itself this object, and so the process group,
        # would live until the interpreter ends, where the group's destructor aborts the process.
        is_plain = axis.turns is None and axis.waits is None
        aside = None if is_plain else replace(axis, turns=None, waits=None)
        self._aside = None if aside is None else type(self)(aside, lane)

    @property
    def _on_lane(self) -> "SharedTokens":
        """The same ranks for work on the lane, which takes no turns, and which no pass waits in."""
        return self._aside or self

    def reduce(self, partial_bsh: Tensor) -> Tensor:
        """As in ``TensorParallel``: an all-reduce."""
        return collectives.all_reduce(partial_bsh, collectives.SUM, self._axis)

    def start_reduction(self, partial_bsh: Tensor) -> Pending[Tensor]:
        """As in ``TensorParallel``; the other pass of a pair has its turn at once."""
        if not self._is_paired:
            leaving = self._lane.submit(lambda: self._on_lane.reduce(partial_bsh))
            return Awaited(leaving, self._axis.waits)
        begun = Begun(self._reducing(partial_bsh), self._axis.waits)
        assert self._axis.turns is not None
        self._axis.turns.hand_over()
        return begun

    @property
    def takes_turns(self) -> bool:
        """As in ``TensorParallel``."""
        return self._axis.turns is not None

    def pause(self) -> None:
        """As in ``TensorParallel``."""
        if self._pause is not None:
            self._pause()

    @property
    def _is_paired(self) -> bool:
        return self._axis.turns is not None and self._axis.turns.runs

    def _reducing(self, partial_bsh: Tensor) -> Steps[Tensor]:
        """Do as ``reduce`` does, in two parts."""
        return collectives.all_reducing(partial_bsh, collectives.SUM, self._axis)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """As in ``TensorParallel``."""
        return collectives.all_gather(tensor, self._axis)

    def reduce_parts(self, partial_nh: Tensor) -> Tensor:
        """As in ``TensorParallel``: an all-reduce."""
        return self.reduce(partial_nh).view(-1)


class SplitTokens(SharedTokens):
    """Every rank has its own part of the sequence outside of attention and MLP.

    Rank k has the tokens k s / t to (k + 1) s / t - 1 of every sample. Arguments are as in
    ``SharedTokens``.
    """

    def __init__(
        self, axis: ConnectedAxis, lane: Lane, pause: Callable[[], None] | None = None
    ) -> None:
        super().__init__(axis, lane, pause)
        self.sequence_parts = axis.size

    def gather(self, x_buh: Tensor) -> Tensor:
        """As in ``TensorParallel``: an all-gather."""
        return _put_together(self.all_gather(x_buh.contiguous()))

    def start_gather(self, x_buh: Tensor) -> Pending[Tensor]:
        """As in ``TensorParallel``."""
        if self._is_paired:
            return Begun(self._gathering(x_buh), self._axis.waits)
        coming = self._lane.submit(lambda: self._on_lane.gather(x_buh))
        return Awaited(coming, self._axis.waits)

    def _gathering(self, x_buh: Tensor) -> Steps[Tensor]:
        """Do as ``gather`` does, in two parts."""
        parts_tbuh = yield from collectives.all_gathering(x_buh.contiguous(), self._axis)
        return _put_together(parts_tbuh)

    def reduce(self, partial_bsh: Tensor) -> Tensor:
        """As in ``TensorParallel``: a reduce-scatter."""
        parts_tbuh = self._cut(partial_bsh)
        return self.reduce_parts(parts_tbuh).view(parts_tbuh.shape[1:])

    def _reducing(self, partial_bsh: Tensor) -> Steps[Tensor]:
        parts_tbuh = self._cut(partial_bsh)
        yield from collectives.reduce_scattering(parts_tbuh.view(-1), self._axis)
        return parts_tbuh[self.rank].clone()

    def _cut(self, x_bsh: Tensor) -> Tensor:
        """Return [t, b, u, h]; a reduce-scatter cuts memory, so a rank's tokens lie together."""
        parts_tbuh: Tensor = x_bsh.unflatten(1, (self.size, -1))
        return parts_tbuh.movedim(1, 0).contiguous()

    def own_tokens(self, x_bsh: Tensor) -> Tensor:
        """As in ``TensorParallel``."""
        return x_bsh.chunk(self.size, dim=1)[self.rank]

    def gather_parts(self, x_buh: Tensor) -> Tensor:
        """As in ``TensorParallel``: an all-gather."""
        return self.all_gather(x_buh.contiguous()).flatten(0, 2)

    def reduce_parts(self, partial_nh: Tensor) -> Tensor:
        """As in ``TensorParallel``: a reduce-scatter."""
        parts = partial_nh.view(self.size, -1)
        collectives.reduce_scatter(parts.view(-1), self._axis)
        return parts[self.rank].clone()  # not a view, which would keep all parts alive


def _put_together(parts_tbuh: Tensor) -> Tensor:
    """Return all tokens, [b, s, h]."""
    return parts_tbuh.movedim(0, 1).flatten(1, 2)


def tensor_parallel(
    axis: ConnectedAxis, device: torch.device, *, sequence_parallel: bool
) -> TensorParallel:
    """Return the strategy of a rank.

    Args:
        axis: the tensor axis, with a process group that only passes use.
        device: on which this rank computes.
        sequence_parallel: whether each rank has its own part of the sequence outside of attention
            and MLP.
    """
    if axis.size == 1:
        return ALONE
    lane = make_lane(device, axis.size, "tensor")
    return SplitTokens(axis, lane) if sequence_parallel else SharedTokens(axis, lane)
