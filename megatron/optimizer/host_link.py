"""The way between a rank's device and its host for an optimizer whose states are on the host.

Gradients and weights travel in *batches* of whole parts. Two slots of the host's memory take turns:
while the CPU updates the batch in one slot, the gradients of the next batch arrive in the other,
and the weights of the batch before leave it. This goes on from one optimizer to the next: a sharded
optimizer has one for every bucket.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.settings import HostStateSettings
from megatron.parallel.lanes import InlineLane, Pending, make_lane, wait_on_host

BATCH: Final = 1 << 24
"""Elements of a batch, if no part has more: 64 MiB of fp32 gradients, 2.7 ms at 25 GB/s."""

SLOTS: Final = 2
_ALIGNED: Final = 64
"""Parts begin at a multiple of this number of elements within a slot."""


def chosen_for_host(
    sizes: Sequence[tuple[str, int]], fraction: float, copied: frozenset[str] = frozenset()
) -> list[int]:
    """Return the indices of the parts whose states go to the host: at least a share of elements.

    Parts that another rank has a copy of are always taken: if the CPU updated one copy and a GPU
    the other, their last bits would differ. Then large parts are taken, as long as they fit into
    the share. The smallest part that is left makes up for missing elements. So the share is
    exceeded by less than that part, or by the copied parts.

    Args:
        sizes: name and elements of every part that the rank updates.
        fraction: the share, from 0 to 1.
        copied: names of the parts that another rank of the same replica has a copy of.
    """
    wanted = fraction * sum(size for _, size in sizes)
    taken, left, elements = list[int](), list[int](), 0

    def order(index: int) -> tuple[bool, int, str]:
        name, size = sizes[index]
        return name not in copied, -size, name

    for index in sorted(range(len(sizes)), key=order):
        name, size = sizes[index]
        if name in copied or elements + size <= wanted:
            taken.append(index)
            elements += size
        else:
            left.append(index)
    if elements < wanted:
        taken.append(left[-1])
    return taken


def parts_on_host(
    parts: Sequence[ParameterPart], fraction: float, copied: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Return the names of the parts whose states go to the host; see ``chosen_for_host``."""
    sizes = [(part.name, part.weight.numel()) for part in parts]
    return frozenset(parts[index].name for index in chosen_for_host(sizes, fraction, copied))


def slot_elements(sizes: Iterable[int], batch: int = BATCH) -> int:
    """Return the elements of a slot for parts of these sizes, in elements.

    A slot has room for ``batch`` elements or for the largest part, but not for more than all.
    """
    rooms = list(map(_room, sizes))
    return min(max(batch, max(rooms, default=0)), sum(rooms))


class Fetched(Protocol):
    """A batch whose gradients travel to the host.

    Attributes:
        steps: number of steps that the batch has taken.
    """

    steps: int

    def fetch(self) -> Pending[None]:
        """Begin to copy the gradients to the host, unless that has begun."""
        ...


@dataclass
class Slot:
    """Memory of the host for the gradients and the rounded weights of a batch.

    Attributes:
        gradients: memory for gradients, a tensor of bytes.
        weights: memory for rounded weights, a tensor of bytes.
        user: the batch whose gradients arrive here or have arrived; ``None`` when no batch needs
            the gradients any more.
        leaving: the last copy of weights from the slot to the device.
    """

    gradients: Tensor
    weights: Tensor
    user: Fetched | None = None
    leaving: Pending[None] | None = None

    def clear(self) -> None:
        """Let the host wait until no copy reads the slot any more."""
        if self.leaving is not None:
            wait_on_host(self.leaving)


class HostLink:
    """The copies between device and host, which a rank's optimizers with states on the host share.

    Args:
        parts: all parts that the rank updates.
        states: which of the parts are on the host, and how they travel.
        device: of the parts.
        copied: see ``chosen_for_host``.
        batch: elements of a batch, if no part has more.

    Attributes:
        names: the parts whose states are on the host.
        slots: take turns.
        out: the lane of gradients to the host.
        back: the lane of weights to the device.
    """

    def __init__(
        self,
        parts: Sequence[ParameterPart],
        states: HostStateSettings,
        device: torch.device,
        copied: frozenset[str] = frozenset(),
        batch: int = BATCH,
    ) -> None:
        self.names = parts_on_host(parts, states.optimizer_offload_fraction, copied)
        own = [part for part in parts if part.name in self.names]
        assert len({part.gradient.dtype for part in own}) <= 1, "rooms in a slot are of elements"
        assert len({part.weight.dtype for part in own if _is_rounded(part)}) <= 1
        self._states, self._is_gpu = states, device.type == "cuda"
        self._batch = slot_elements((part.weight.numel() for part in own), batch)
        self._order: list[Fetched] = []
        of_gradient = max((part.gradient.itemsize for part in own), default=0)
        of_weight = max((part.weight.itemsize for part in own if _is_rounded(part)), default=0)
        self.slots = tuple(
            Slot(
                self._memory(self._batch * of_gradient, torch.uint8, pins=states.pins_gradients),
                self._memory(self._batch * of_weight, torch.uint8, pins=states.pins_weights),
            )
            for _ in range(SLOTS)
        )
        self.out, self.back = (
            make_lane(device, 2, name) if states.overlap_cpu_optimizer_d2h_h2d else InlineLane()
            for name in ("gradients to the host", "weights from the host")
        )

    def enter(self, batch: Fetched) -> Slot:
        """Return the slot of a batch that travels after all batches so far."""
        self._order.append(batch)
        return self.slots[(len(self._order) - 1) % len(self.slots)]

    def fetch_after(self, batch: Fetched) -> None:
        """Begin to copy the gradients of the batch after ``batch``.

        This does nothing if that batch has taken this step already: its gradients would belong to
        the next step.

        Optimizers usually step in the order in which they were made. In another order, a batch may
        lose its slot to another batch. Then its gradients are copied once more, when it steps.
        """
        for following in self._order[self._order.index(batch) + 1 :][:1]:
            if following.steps == batch.steps:
                following.fetch()

    def close(self) -> None:
        """Release both lanes."""
        self.out.close()
        self.back.close()

    def _memory(self, elements: int, dtype: torch.dtype, *, pins: bool) -> Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=pins and self._is_gpu)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy between host and device; overlapping copies let the host go on at once."""
        target.copy_(source, non_blocking=self._states.overlap_cpu_optimizer_d2h_h2d)

    def batches(self, parts: Sequence[ParameterPart]) -> Iterator[list[ParameterPart]]:
        """Yield ``parts`` (on the host) in batches, in their order; a slot has room for each."""
        own: list[ParameterPart] = []
        for part in parts:
            if own and sum(_room(each.weight.numel()) for each in [*own, part]) > self._batch:
                yield own
                own = []
            own.append(part)
        if own:
            yield own

    def on_host(self, batch: Sequence[ParameterPart], slot: Slot) -> list[ParameterPart]:
        """Return copies of a batch's parts on the host, with the weights of the device.

        A weight that is its own master has memory for good; others are in the slot with gradients.
        """
        found, place = [], 0
        for part in batch:
            if _is_rounded(part):
                weight = _view(slot.weights, part.weight, place)
            else:
                weight = self._memory(
                    part.weight.numel(), part.weight.dtype, pins=self._states.pins_weights
                ).view(part.weight.shape)
            weight.copy_(part.weight)
            gradient = _view(slot.gradients, part.gradient, place)
            found.append(ParameterPart(part.owned, weight, gradient, part.pieces))
            place += _room(part.weight.numel())
        return found


def _room(elements: int) -> int:
    """Return the elements of a slot that a part with so many elements takes."""
    return -(-elements // _ALIGNED) * _ALIGNED


def _is_rounded(part: ParameterPart) -> bool:
    """Return whether the part's weight is narrower than its master."""
    dtype = part.weight.dtype
    return dtype != torch.promote_types(dtype, torch.float32)


def _view(memory: Tensor, like: Tensor, place: int) -> Tensor:
    """Return memory of the shape and dtype of a tensor, ``place`` elements behind the begin."""
    begin = place * like.itemsize
    size = like.numel() * like.itemsize
    return memory[begin : begin + size].view(like.dtype).view(like.shape)
