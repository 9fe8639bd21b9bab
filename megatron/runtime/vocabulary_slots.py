"""Slots of the vocabulary passes: the static memory and the graphs of S and T, of IF and of IB.

``pass_graphs.py`` says what a slot is for. A microbatch occupies a slot of the output layer from
its S to its T. The results of S stay in the slot, where the barriers and T read them: exponentials
and A are not copied. The barriers have no graphs, because their collectives are issued on another
stream while passes run.

A slot of IF or IB keeps nothing between passes, so one serves all microbatches.

Shapes: n tokens of a microbatch, h hidden, D further tokens that every token predicts.
"""

from collections.abc import Callable
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.layers.main_grad import main_grad_of
from megatron.layers.vocabulary.input_layer import InputLayer
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.layers.vocabulary.output_s import Merged, ShardState
from megatron.runtime.replayed import NewSlot, Replayed, SlotMemory


class AfterT(NamedTuple):
    """The results of T, which are the receiver's.

    Attributes:
        losses: weighted, [1 + D]; ``None`` if this rank does not tell losses.
        gradient_nh: this rank's part of the input gradient; ``None`` if S has begun it.
    """

    losses: Tensor | None
    gradient_nh: Tensor | None


class OutputSlot:
    """The passes S and T of one microbatch in flight.

    Args:
        layer: the output layer of this rank.
        form_gradient_in_s: whether S begins the input gradient (Algorithm 2), or T forms it.
        losses: returns the losses from the merged statistics and the weights of tokens; ``None``:
            this rank does not tell losses.
        memory: of this slot alone.
        free: called when the slot is free again.
    """

    def __init__(
        self,
        layer: OutputLayer,
        form_gradient_in_s: bool,
        losses: Callable[[Merged, Tensor], Tensor] | None,
        memory: SlotMemory,
        free: Callable[["OutputSlot"], None],
    ) -> None:
        self._layer, self._in_s, self._losses = layer, form_gradient_in_s, losses
        self._memory, self._free = memory, free
        self._s = Replayed(memory.graph(), self._launch_s)
        self._t = Replayed(memory.graph(), self._launch_t)
        self._given: tuple[Tensor, Tensor] | None = None
        self._numbers_5n: Tensor | None = None

    def s(self, x_nh: Tensor, targets_n: Tensor) -> ShardState:
        """S: return the state, whose tensors stay in the slot."""
        if self._given is None:
            with self._memory.lasting():
                self._given = x_nh.clone(), targets_n.clone()
        else:
            for place, own in zip(self._given, (x_nh, targets_n), strict=True):
                place.copy_(own)
        self._s.run()
        # The barrier drops A from the state that it gets; the next S of this slot writes A again.
        return copy(self._state)

    def t(self, merged: Merged, weight_n: Tensor) -> AfterT:
        """T: add the weight gradient to ``main_grad``; arguments are as in ``OutputLayer.t``."""
        main_grad_of(self._layer.weight)  # the graph always adds
        if self._numbers_5n is None:
            with self._memory.lasting():
                self._numbers_5n = merged.max_n.new_empty(5, len(merged.max_n))
        rows = merged.max_n, merged.sum_n, merged.target_n, merged.logit_sum_n, weight_n
        torch.stack(rows, out=self._numbers_5n)  # one launch
        self._t.run()
        # The next S of this slot follows on the same stream, behind the copies.
        self._free(self)
        return AfterT(*(None if own is None else own.clone() for own in self._left))

    def close(self) -> None:
        """Let go of the graphs."""
        self._s.close()
        self._t.close()

    def _launch_s(self) -> None:
        assert self._given is not None
        self._state = self._layer.s(*self._given, form_gradient=self._in_s)

    @torch.no_grad()
    def _launch_t(self) -> None:
        assert self._numbers_5n is not None
        *statistics, weight_n = self._numbers_5n
        merged = Merged(*statistics)
        losses = None if self._losses is None else self._losses(merged, weight_n)
        # T adds to the state what it forms; the barrier of the next microbatch must not find it.
        state, in_t = copy(self._state), not self._in_s
        gradient_nh = self._layer.t(state, merged, weight_n, form_gradient=in_t, keeps_room=True)
        self._left = AfterT(losses, gradient_nh)


class LookupSlot:
    """IF of all microbatches, one after the other.

    Args:
        layer: the embeddings.
        memory: of slots that keep nothing between passes.
    """

    def __init__(self, layer: InputLayer, memory: SlotMemory) -> None:
        self._layer, self._memory = layer, memory
        self._pass = Replayed(memory.graph(), self._launch)
        self._tokens_n: Tensor | None = None

    def run(self, tokens_n: Tensor) -> Tensor:
        """Return [n, h], as ``InputLayer.lookup`` does."""
        if self._tokens_n is None:
            with self._memory.lasting():
                self._tokens_n = tokens_n.clone()
        else:
            self._tokens_n.copy_(tokens_n)
        self._pass.run()
        return self._rows_nh.clone()

    def close(self) -> None:
        """Let go of the graph."""
        self._pass.close()

    def _launch(self) -> None:
        assert self._tokens_n is not None
        self._rows_nh = self._layer.lookup(self._tokens_n)


class EmbeddingGradientSlot:
    """IB of all microbatches, one after the other; arguments are as in ``LookupSlot``."""

    def __init__(self, layer: InputLayer, memory: SlotMemory) -> None:
        self._layer, self._memory = layer, memory
        self._pass = Replayed(memory.graph(), self._launch)
        self._given: tuple[Tensor, Tensor] | None = None

    def run(self, tokens_n: Tensor, gradient_nh: Tensor) -> None:
        """Add a gradient to ``main_grad``, as ``InputLayer.add_gradient`` does."""
        main_grad_of(self._layer.weight)  # the graph always adds
        if self._given is None:
            with self._memory.lasting():
                self._given = tokens_n.clone(), gradient_nh.clone()
        else:
            for place, own in zip(self._given, (tokens_n, gradient_nh), strict=True):
                place.copy_(own)
        self._pass.run()

    def close(self) -> None:
        """Let go of the graph."""
        self._pass.close()

    def _launch(self) -> None:
        assert self._given is not None
        self._layer.add_gradient(*self._given)


class VocabularyGraphs:
    """The graphs of a rank's vocabulary passes.

    Args:
        new_slot: returns the memory of a new slot.
    """

    def __init__(self, new_slot: NewSlot) -> None:
        self._new_slot = new_slot
        self._outputs: list[OutputSlot] = []
        self._free: list[OutputSlot] = []
        self._shared: SlotMemory | None = None
        self._lookups: dict[tuple[int, torch.Size], LookupSlot] = {}
        self._gradients: dict[tuple[int, torch.Size], EmbeddingGradientSlot] = {}

    @property
    def slots(self) -> int:
        """Slots so far."""
        return len(self._outputs) + len(self._lookups) + len(self._gradients)

    def begin(self) -> None:
        """Begin an iteration: all slots are free."""
        self._free = list(self._outputs)

    def output(
        self,
        layer: OutputLayer,
        form_gradient_in_s: bool,
        losses: Callable[[Merged, Tensor], Tensor] | None,
    ) -> OutputSlot:
        """Take a free slot of the output layer; the arguments are the same in all calls."""
        if not self._free:
            memory = self._new_slot("output")
            slot = OutputSlot(layer, form_gradient_in_s, losses, memory, self._let_go)
            self._outputs.append(slot)
            return slot
        return self._free.pop()

    def lookup(self, layer: InputLayer, tokens_n: Tensor) -> Tensor:
        """IF; see ``LookupSlot.run``."""
        key = id(layer), tokens_n.shape
        if key not in self._lookups:
            self._lookups[key] = LookupSlot(layer, self._of_input())
        return self._lookups[key].run(tokens_n)

    def add_gradient(self, layer: InputLayer, tokens_n: Tensor, gradient_nh: Tensor) -> None:
        """IB; see ``EmbeddingGradientSlot.run``."""
        key = id(layer), tokens_n.shape
        if key not in self._gradients:
            self._gradients[key] = EmbeddingGradientSlot(layer, self._of_input())
        self._gradients[key].run(tokens_n, gradient_nh)

    def close(self) -> None:
        """Let go of all graphs and of their memory; no pass runs any more."""
        slots: list[OutputSlot | LookupSlot | EmbeddingGradientSlot] = [*self._outputs]
        for slot in (*slots, *self._lookups.values(), *self._gradients.values()):
            slot.close()
        self._outputs.clear()
        self._free.clear()
        self._lookups.clear()
        self._gradients.clear()
        self._shared = None

    def _of_input(self) -> SlotMemory:
        """Return the memory that the graphs of IF and IB share: they run one after the other."""
        if self._shared is None:
            self._shared = self._new_slot("input")
        return self._shared

    def _let_go(self, slot: OutputSlot) -> None:
        self._free.append(slot)
