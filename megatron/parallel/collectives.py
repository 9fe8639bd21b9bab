"""Collectives over an axis; a result for one rank only goes to the rank at the place ``root``."""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel import p2p
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.waits import Waits, waiting

T = TypeVar("T")

Sizes = Sequence[int] | None
Operation = dist.ReduceOp.RedOpType
MAXIMUM: Final = dist.ReduceOp.MAX
SUM: Final = dist.ReduceOp.SUM

_gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sums = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""PyTorch 2.13 renamed these functions, and warns about the names of older versions."""


Steps: TypeAlias = Generator[None, None, T]
"""A collective in two parts: up to its ``yield`` it begins, and afterwards it ends.

All ranks begin the collectives of an axis in one order, and end them in one order.
"""


class Begun(Generic[T]):
    """A collective that has begun.

    Args:
        steps: the collective; it begins now.
        waits: are told of the wait for the end; ``None``: the caller tells of it.
    """

    def __init__(self, steps: Steps[T], waits: Waits | None = None) -> None:
        self._steps: Steps[T] | None = steps
        self._waits = waits
        self._results: list[T] = []
        next(steps)

    def wait(self) -> T:
        """Wait for the end, and return the result; on CUDA the current stream waits."""
        if self._steps is not None:
            steps, self._steps = self._steps, None
            with waiting(self._waits):
                self._results.append(_end(steps))
        return self._results[0]


def _end(steps: Steps[T]) -> T:
    try:
        next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a collective has two parts")


def in_turns(steps: Steps[T], axis: ConnectedAxis) -> T:
    """Run a collective; the other pass of a pair goes on while it is under way."""
    if axis.turns is None:  # PyTorch's collectives wait as soon as they begin
        with waiting(axis.waits):
            return Begun(steps).wait()
    begun = Begun(steps, axis.waits)
    _hand_over(axis)
    return begun.wait()


def _whole(
    axis: ConnectedAxis, collective: Callable[..., Any], *args: Any, **named: Any
) -> Steps[None]:
    """Run one of PyTorch's collectives."""
    if axis.turns is None:
        collective(*args, group=axis.group, **named)
        yield
        return
    work = collective(*args, group=axis.group, async_op=True, **named)
    yield
    work.wait()


def _for_each(
    axis: ConnectedAxis, collective: Callable[..., Any], parts: Sequence[Tensor], root: str
) -> Steps[None]:
    """Run one of PyTorch's collectives for every part that has elements.

    The sizes of parts may depend on data, and so on the rank. The number of turns must not.

    Args:
        axis: the ranks.
        collective: ``broadcast`` or ``reduce``.
        parts: one for each rank, which is its root.
        root: name of the collective's argument for the root.
    """
    under_way = [
        collective(part, group=axis.group, async_op=True, **{root: rank})
        for rank, part in _not_empty(parts)
    ]
    yield
    for work in under_way:
        work.wait()


def _hand_over(axis: ConnectedAxis) -> None:
    """Let the other pass of a pair go on while transfers that have begun are under way.

    Nothing is under way on an axis of one rank. All ranks of an axis know its size, so all hand
    over at the same places. Costs know the same places (``simulator/costs/turns.py``).
    """
    if axis.turns is not None and axis.size > 1:
        axis.turns.hand_over()


def broadcast(tensor: Tensor, root: int, axis: ConnectedAxis) -> Tensor:
    """Fill ``tensor`` on every rank with the root's values."""
    if axis.size > 1:
        dist.broadcast(tensor, group=axis.group, group_src=root)
    return tensor


def reduce(tensor: Tensor, root: int, axis: ConnectedAxis) -> Tensor:
    """Sum ``tensor`` over the ranks, in place on the root; on other ranks it becomes undefined."""
    if axis.size == 1:
        return tensor
    if tensor.device.type == "cpu":
        return _reduce_along_tree(tensor, root, axis)
    dist.reduce(tensor, group=axis.group, group_dst=root)
    return tensor


def _reduce_along_tree(tensor: Tensor, root: int, axis: ConnectedAxis) -> Tensor:
    """Sum up along a binomial tree, because gloo's own reduction takes many steps.

    Measured with 2 ranks on 2 cores and an activation of half a MiB: 0.3 ms instead of 1.9 ms.
    """
    size = axis.size
    place, step = (axis.rank - root) % size, 1  # counted from the root
    while step < size and not place & step:
        if place + step < size:
            buffer = torch.empty_like(tensor)
            tensor.add_(p2p.receive(buffer, (place + step + root) % size, axis).wait())
        step *= 2
    if place:
        p2p.send(tensor, (place - step + root) % size, axis).wait()
    return tensor


def all_reduce(tensor: Tensor, operation: Operation, axis: ConnectedAxis) -> Tensor:
    """Combine ``tensor`` over the ranks by ``operation``, in place, the same on every rank."""
    return in_turns(all_reducing(tensor, operation, axis), axis)


def all_reducing(tensor: Tensor, operation: Operation, axis: ConnectedAxis) -> Steps[Tensor]:
    """Combine ``tensor`` as ``all_reduce`` does, in two parts."""
    if axis.size == 1:
        yield
        return tensor
    yield from _whole(axis, dist.all_reduce, tensor, operation)
    return tensor


def all_gather(tensor: Tensor, axis: ConnectedAxis) -> Tensor:
    """Return [size, ...] with the ``tensor`` of every rank, by place."""
    return in_turns(all_gathering(tensor, axis), axis)


def all_gathering(tensor: Tensor, axis: ConnectedAxis) -> Steps[Tensor]:
    """Gather as ``all_gather`` does, in two parts."""
    gathered = torch.empty((axis.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    if axis.size == 1:
        gathered[0].copy_(tensor)
        yield
    elif tensor.device.type == "cpu":
        yield from _gather_by_doubling(gathered, tensor, axis)
    else:
        yield from _whole(axis, _gather_whole, gathered, tensor)
    return gathered


def _gather_by_doubling(gathered: Tensor, own: Tensor, axis: ConnectedAxis) -> Steps[None]:
    """Fill ``gathered`` in a logarithmic number of steps (Bruck et al., IEEE TPDS 8, 1997).

    Gloo's own all-gather passes everything around a ring, from neighbour to neighbour. Statistics
    are so small that the number of steps decides the time. In step k every rank sends all blocks
    that it holds to the rank 2^k below.
    """
    rank, size = axis.rank, axis.size
    blocks = torch.empty_like(gathered)  # in order of place, from this rank on
    blocks[0].copy_(own)
    held, sending = 1, []
    while held < size:
        count = min(held, size - held)
        # A block is never written again, so no send need end before the next step.
        sending.append(p2p.send(blocks[:count], (rank - held) % size, axis))
        coming = p2p.receive(blocks[held : held + count], (rank + held) % size, axis)
        # One turn for all steps, because ranks without elements hand over once (``gather_parts``).
        if held == 1:
            yield
        coming.wait()
        held += count
    for transfer in sending:
        transfer.wait()
    torch.cat((blocks[size - rank :], blocks[: size - rank]), out=gathered)


def all_to_all(
    rows: Tensor, axis: ConnectedAxis, sent: Sizes = None, received: Sizes = None
) -> Tensor:
    """Send every rank its rows; return the rows that all ranks have sent here, by place.

    Args:
        rows: [n, ...], the rows for place 0 first.
        axis: the ranks.
        sent: rows for every place, maybe 0; ``None``: equally many for all.
        received: rows from every place; ``None``: equally many from all.
    """
    if axis.size == 1:
        return rows
    total = len(rows) if received is None else sum(received)
    result = rows.new_empty((total, *rows.shape[1:]))
    exchanging = _whole(
        axis,
        dist.all_to_all_single,
        result,
        rows.contiguous(),
        None if received is None else list(received),
        None if sent is None else list(sent),
    )
    in_turns(exchanging, axis)
    return result


def shift(tensor: Tensor, axis: ConnectedAxis, places: int = 1) -> Tensor:
    """Send a contiguous ``tensor`` some places on along the axis' ring; return the arrived tensor.

    All ranks send and receive at once. On NCCL that needs one call for both.
    """
    after, before = (axis.rank + places) % axis.size, (axis.rank - places) % axis.size
    received = torch.empty_like(tensor)
    if tensor.is_cuda:
        both = [
            dist.P2POp(dist.isend, tensor, group=axis.group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=axis.group, group_peer=before),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return received
    # The receive is posted first: with every rank in a blocking send, nobody would receive.
    coming = p2p.receive(received, before, axis)
    p2p.send(tensor, after, axis).wait()
    return coming.wait()


def reduce_scatter(tensor: Tensor, axis: ConnectedAxis, sizes: Sizes = None) -> None:
    """Sum ``tensor`` over the ranks, in place; rank k gets part k.

    The other parts are undefined afterwards. On CPUs each rank sends every other rank that rank's
    part, because gloo has no such collective. Each rank adds up in the order of the ranks, so that
    the sum of an element does not depend on its place.

    Args:
        tensor: one-dimensional.
        axis: the ranks.
        sizes: sizes of the parts, one for each rank, maybe 0; ``None``: equal parts.
    """
    in_turns(reduce_scattering(tensor, axis, sizes), axis)


def reduce_scattering(tensor: Tensor, axis: ConnectedAxis, sizes: Sizes = None) -> Steps[None]:
    """Sum as ``reduce_scatter`` does, in two parts."""
    if axis.size == 1 or not tensor.numel():
        yield  # ranks with elements hand over once, and so does this rank
        return
    parts = _split(tensor, axis, sizes)
    if tensor.device.type == "cpu":
        yield from _exchange_parts(parts, axis)
    elif _equal(parts):
        yield from _whole(axis, _scatter_sums, parts[axis.rank], tensor)
    else:
        yield from _for_each(axis, dist.reduce, parts, "group_dst")


def _split(tensor: Tensor, axis: ConnectedAxis, sizes: Sizes) -> tuple[Tensor, ...]:
    return tensor.view(axis.size, -1).unbind() if sizes is None else tensor.split(tuple(sizes))


def _equal(parts: Sequence[Tensor]) -> bool:
    return len({part.numel() for part in parts}) == 1


def _not_empty(parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield the parts that have elements, each with its rank."""
    return ((rank, part) for rank, part in enumerate(parts) if part.numel())


def _exchange_parts(parts: Sequence[Tensor], axis: ConnectedAxis) -> Steps[None]:
    rank, others = axis.rank, [other for other in range(axis.size) if other != axis.rank]
    received = {other: torch.empty_like(parts[rank]) for other in others}
    # All ranks know the sizes, so an empty part is neither sent nor awaited.
    coming = [p2p.receive(received[other], other, axis) for other in others if parts[rank].numel()]
    going = [p2p.send(part, other, axis) for other, part in _not_empty(parts) if other != rank]
    yield
    for transfer in (*coming, *going):
        transfer.wait()
    received[rank] = parts[rank]
    total = received[0].clone()
    for other in range(1, axis.size):
        total += received[other]
    parts[rank].copy_(total)


def gather_parts(tensor: Tensor, axis: ConnectedAxis, sizes: Sizes = None) -> None:
    """Fill ``tensor`` on every rank with part k from rank k; arguments as in ``reduce_scatter``."""
    if axis.size > 1:
        in_turns(_gathering_parts(tensor, axis, sizes), axis)


def _gathering_parts(tensor: Tensor, axis: ConnectedAxis, sizes: Sizes) -> Steps[None]:
    if not tensor.numel():
        yield  # ranks with elements hand over once, and so does this rank
        return
    parts = _split(tensor, axis, sizes)
    on_host = tensor.device.type == "cpu"
    if _equal(parts) and on_host:
        yield from _gather_by_doubling(tensor.view(axis.size, -1), parts[axis.rank], axis)
    elif _equal(parts):
        yield from _whole(axis, _gather_whole, tensor, parts[axis.rank])
    elif on_host:
        yield from _send_parts_to_all(parts, axis)
    else:
        yield from _for_each(axis, dist.broadcast, parts, "group_src")


def _send_parts_to_all(parts: Sequence[Tensor], axis: ConnectedAxis) -> Steps[None]:
    rank, own = axis.rank, parts[axis.rank]
    coming = [p2p.receive(part, other, axis) for other, part in _not_empty(parts) if other != rank]
    others = [other for other in range(axis.size) if other != rank and own.numel()]
    going = [p2p.send(own, other, axis) for other in others]
    yield
    for transfer in (*coming, *going):
        transfer.wait()


def all_reduce_parts(tensor: Tensor, axis: ConnectedAxis, sizes: Sizes = None) -> None:
    """Sum ``tensor`` over the ranks in place; on CPUs to the same bits as ``reduce_scatter``.

    Arguments are as in ``reduce_scatter``.
    """
    if tensor.device.type == "cpu":
        reduce_scatter(tensor, axis, sizes)
        gather_parts(tensor, axis, sizes)
    else:
        all_reduce(tensor, SUM, axis)
