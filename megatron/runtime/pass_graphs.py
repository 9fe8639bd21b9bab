"""Passes of a rank as graphs of launches, which the host replays at the cost of one launch.

This file has F, B and W of stages, ``vocabulary_slots.py`` the passes of the vocabulary.

Shapes never change, so a pass launches the same kernels on the same memory again and again. A
*slot* is the static memory of one microbatch, for inputs and outputs, together with one graph for
each pass, captured when the slot is first used. A microbatch occupies a slot from its F to its B,
or to its W. Microbatches in flight have different slots, and slots share no memory, because slots
may overtake each other. Within a slot the graphs always run in the order of their capture.

A graph's addresses are fixed, so inputs are copied into the slot and outputs out of it. A graph
always adds to gradients, so gradients are set to zero before an iteration's first backward. Weights
in 8 bits are quantised before an iteration's first forward, into memory that stays.

Whatever differs from microbatch to microbatch is an input (``StageInput``): a number that the host
would hand to a kernel is frozen in the graph.

Shapes: b batch, u tokens of a sequence that a rank has, w following tokens, h hidden.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from megatron.layers.main_grad import main_grad_of
from megatron.model.stage import RankModel
from megatron.runtime.buckets import parts_of_chunks
from megatron.runtime.pass_slots import Slot, StageInput, StageOutput
from megatron.runtime.replayed import CudaSlot, NewSlot, Work
from megatron.runtime.vocabulary_slots import VocabularyGraphs


class StageGraphs:
    """The graphs of all passes of a rank.

    Args:
        model: this rank's part of the model.
        new_slot: makes the memory of a slot.

    Attributes:
        vocabulary: the graphs of the vocabulary passes.
    """

    def __init__(
        self,
        model: RankModel,
        new_slot: NewSlot = CudaSlot,
    ) -> None:
        self._model, self._new_slot = model, new_slot
        self.vocabulary = VocabularyGraphs(new_slot)
        self._parameters: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._parts: defaultdict[int, list[nn.Module]] = defaultdict(list)
        for part, chunk in parts_of_chunks(model):
            self._parts[chunk].append(part)
            self._parameters[chunk] += part.parameters()
        self._slots: defaultdict[int, list[Slot]] = defaultdict(list)
        self._free: dict[int, list[Slot]] = {}
        self._incomplete: set[int] = set()
        self._stale: set[int] = set()

    @property
    def are_ready(self) -> bool:
        """Whether passes may be captured in this iteration.

        In 8 bits with delayed scales, tensors of the first iteration are scaled by themselves,
        which no later iteration does.
        """
        eight_bits = self._model.eight_bits
        return eight_bits is None or eight_bits.repeats

    @property
    def slots(self) -> int:
        """Slots so far: of each stage as many as microbatches that were in flight at most."""
        return sum(map(len, self._slots.values())) + self.vocabulary.slots

    def begin(self) -> None:
        """Begin an iteration: all slots are free, and no gradient has been formed."""
        self._free = {chunk: list(slots) for chunk, slots in self._slots.items()}
        self._incomplete, self._stale = set(self._parameters), set(self._parameters)
        self.vocabulary.begin()

    def forward(
        self, chunk: int, given: StageInput, take_deferred: Callable[[], Sequence[Work]] | None
    ) -> tuple[Slot, StageOutput]:
        """Run F of a chunk in a free slot; return the slot and the results of the stage.

        Args:
            chunk: of this rank.
            given: inputs of its stage.
            take_deferred: see ``Slot``; the same in all calls.
        """
        self._renew(chunk)
        free = self._free.setdefault(chunk, [])
        if not free:
            slot = Slot(
                partial(self._model, chunk),
                take_deferred,
                self._new_slot("stage"),
                partial(self._complete, chunk),
                partial(self._let_go, chunk),
            )
            self._slots[chunk].append(slot)
            free.append(slot)
        slot = free.pop()
        return slot, slot.forward(given)

    def close(self) -> None:
        """Let go of all graphs and of their memory; no pass runs any more.

        NCCL cannot destroy a communicator before the graphs that hold its collectives are gone: the
        process would wait for ever.
        """
        for slots in self._slots.values():
            for slot in slots:
                slot.close()
        self._slots.clear()
        self._free.clear()
        self.vocabulary.close()

    def _complete(self, chunk: int) -> None:
        """Set gradients to zero before the first backward of a chunk in an iteration."""
        if chunk in self._incomplete:
            self._incomplete.remove(chunk)
            for parameter in self._parameters[chunk]:
                main_grad_of(parameter)

    def _renew(self, chunk: int) -> None:
        """Quantise the weights of a chunk before its first forward in an iteration."""
        eight_bits = self._model.eight_bits
        if chunk in self._stale and eight_bits is not None:
            for part in self._parts[chunk]:
                eight_bits.renew(part)
        self._stale.discard(chunk)

    def _let_go(self, chunk: int, slot: Slot) -> None:
        self._free[chunk].append(slot)
