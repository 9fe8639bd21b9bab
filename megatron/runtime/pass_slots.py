"""A slot: the static memory and the graphs of one microbatch in flight through one stage.

``pass_graphs.py`` says what a slot is for.

Shapes: b batch, u tokens of a sequence that a rank has, w following tokens, h hidden.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.layers.dropout import DropoutSeeds
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.left_losses import LayerLosses, LeftLoad, LeftLoss
from megatron.layers.weight_gradients import parts_of
from megatron.runtime.entry import Entry
from megatron.runtime.replayed import Replayed, SlotMemory, Work

_NOTHING_IS_DRAWN: Final = DropoutSeeds(0, 0, 0)
"""Tells layers that they are trained. Graphs are refused wherever a layer draws numbers."""


class StageInput(NamedTuple):
    """The tensors that a stage reads in one microbatch; those that are there never change in shape.

    Attributes:
        x_buh: the stage's input.
        ahead_bwh: embeddings of the following tokens, on the stage of multi-token prediction.
        positions_bs: as in ``ForwardPass``.
    """

    x_buh: Tensor
    ahead_bwh: Tensor | None = None
    positions_bs: Tensor | None = None

    def placed(self, places: "StageInput | None") -> "StageInput":
        """Copy the tensors to static ones, and return those; ``None``: make static ones."""
        if places is None:
            return StageInput(
                self.x_buh.clone(), _copied(self.ahead_bwh), _copied(self.positions_bs)
            )
        for own, place in zip(self, places, strict=True):
            assert (own is None) == (place is None), "a tensor is always there, or never"
            if own is not None and place is not None:
                assert own.shape == place.shape, "shapes never change"
                place.copy_(own)
        return places


class StageOutput(NamedTuple):
    """The results of F; all but ``y_buh`` lie in the slot, until the slot's next F.

    Attributes:
        y_buh: the stage's output; with multi-token prediction b is larger.
        losses: of layers. Those whose ``loss`` is trained on wait for B.
        loads: of the layers' experts.
    """

    y_buh: Tensor
    losses: Sequence[LeftLoss]
    loads: Sequence[LeftLoad]


class StageGradients(NamedTuple):
    """The gradients of the tensors of a ``StageInput``."""

    x_buh: Tensor
    ahead_bwh: Tensor | None


class Slot:
    """The passes of one microbatch in flight through one stage.

    Args:
        run: the stage's layers, [b, u, h] -> [b, u, h], with what else a pass brings.
        take_deferred: returns the work that a backward has just left for W; ``None``: there are
            no W passes.
        memory: of this slot alone.
        complete: called before the backward; it sets gradients to zero if they hold no sum yet.
        free: called when the slot is free again.
    """

    def __init__(
        self,
        run: Callable[[Tensor, ForwardPass], Tensor],
        take_deferred: Callable[[], Sequence[Work]] | None,
        memory: SlotMemory,
        complete: Work,
        free: Callable[["Slot"], None],
    ) -> None:
        self._run, self._take_deferred = run, take_deferred
        self._memory, self._complete, self._free = memory, complete, free
        self._forward = Replayed(memory.graph(), self._launch_forward)
        self._backward = Replayed(memory.graph(), self._launch_backward)
        self._weights = Replayed(memory.graph(), self._launch_weights)
        self._given: StageInput | None = None
        self._gradient: Tensor | None = None
        self._edges: list[GradientEdge] = []
        self._loss_gradients: list[Tensor] = []
        self._loss_weight: float | None = None
        self._deferred: list[Work] = []

    def forward(self, given: StageInput) -> StageOutput:
        """F: return the results of the stage."""
        with self._memory.lasting():
            self._given = given.placed(self._given)
        self._forward.run()
        return StageOutput(self._y.clone(), self._losses, self._loads)

    def backward(self, gradient_buh: Tensor, loss_weight: float) -> StageGradients:
        """B: return the gradients of the inputs.

        Args:
            gradient_buh: of the output.
            loss_weight: of the losses of the layers in the loss of the iteration.
        """
        self._complete()
        if self._gradient is None:
            with self._memory.lasting():
                self._gradient = torch.empty_like(self._y)
        self._gradient.copy_(gradient_buh.view_as(self._y))
        self._weigh_losses(loss_weight)
        self._backward.run()
        if self._take_deferred is None:
            # The next F of this slot follows on the same stream, behind the copy of the gradient.
            self._free(self)
        return StageGradients(self._x_gradient.clone(), _copied(self._ahead_gradient))

    def weight_gradients(self) -> None:
        """W: form the weight gradients that B has left."""
        self._weights.run()
        self._free(self)

    def close(self) -> None:
        """Let go of the graphs."""
        for replayed in (self._forward, self._backward, self._weights):
            replayed.close()

    def _weigh_losses(self, weight: float) -> None:
        """Write the gradient of the layers' losses, which is the same in most microbatches."""
        if weight == self._loss_weight:
            return
        if self._loss_weight is None:  # not in the graph of F, which would write them again
            with self._memory.lasting():
                self._loss_gradients = [torch.empty_like(own) for own in self._trained]
        self._loss_weight = weight
        for gradient in self._loss_gradients:
            gradient.fill_(weight)

    def _launch_forward(self) -> None:
        given = self._given
        assert given is not None
        self._entry, losses, ahead_bwh = Entry(), LayerLosses(), given.ahead_bwh
        self._ahead_entry = None if ahead_bwh is None else Entry()
        if self._ahead_entry is not None and ahead_bwh is not None:
            ahead_bwh = self._ahead_entry.connect(ahead_bwh)
        forward_pass = ForwardPass(
            _NOTHING_IS_DRAWN, positions_bs=given.positions_bs, ahead_bwh=ahead_bwh, losses=losses
        )
        y_buh = self._run(self._entry.connect(given.x_buh), forward_pass)
        left, self._loads = losses.close()
        trained = [own.loss for own in left if own.loss.requires_grad]
        # The edges keep the graph alive until B is captured, but neither input nor output.
        self._edges = [get_gradient_edge(own) for own in (y_buh, *trained)]
        self._y, self._trained = y_buh.detach(), [own.detach() for own in trained]
        self._losses = [own._replace(loss=own.loss.detach()) for own in left]

    def _launch_backward(self) -> None:
        assert self._edges, "captured once, after F"
        assert self._gradient is not None
        torch.autograd.backward(self._edges, (self._gradient, *self._loss_gradients))
        self._edges, self._x_gradient = [], self._entry.take_gradient()
        ahead = self._ahead_entry
        self._ahead_gradient = None if ahead is None else ahead.take_gradient()
        if self._take_deferred is not None:
            self._deferred += self._take_deferred()

    def _launch_weights(self) -> None:
        for part in parts_of(self._deferred):
            part()
            del part  # its activations


def _copied(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()
