"""Losses that layers have of their own, and the loads of experts, as a forward leaves them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class LeftLoss(NamedTuple):
    """A loss that a layer has of its own, such as a router's balancing loss.

    Attributes:
        layer: index of the layer in the whole model.
        name: of the loss in the log.
        value: a scalar without a graph: the mean over the tokens that this rank has outside of
            attention and MLP.
        loss: the same times its coefficient, with its graph: the part of the loss that is trained
            on.
    """

    layer: int
    name: str
    value: Tensor
    loss: Tensor


class LeftLoad(NamedTuple):
    """How often this rank's tokens have chosen each expert of a layer.

    Attributes:
        layer: index of the layer in the whole model.
        times_e: int64 [e].
    """

    layer: int
    times_e: Tensor


class LayerLosses:
    """Collects the losses and the loads of a stage's layers, in one forward pass.

    A layer that is computed again for its backward leaves them again. The collection is closed by
    then, and drops the second ones.

    Args:
        so_far: for each layer, how often each expert was chosen in the earlier microbatches of the
            iteration, over the global batch. The pass adds its own numbers.
    """

    def __init__(self, so_far: dict[int, Tensor] | None = None) -> None:
        self._losses: list[LeftLoss] = []
        self._loads: list[LeftLoad] = []
        self._so_far = {} if so_far is None else so_far
        self._with_own: dict[int, Tensor] = {}
        self.is_open = True

    def leave(self, loss: LeftLoss) -> None:
        """Leave a loss."""
        if self.is_open:
            self._losses.append(loss)

    def leave_load(self, load: LeftLoad) -> None:
        """Leave a load."""
        if self.is_open:
            self._loads.append(load)

    def choices_so_far(self, layer: int, own: Callable[[], Tensor]) -> Tensor:
        """Return how often experts were chosen in this microbatch and in all earlier ones.

        A layer that is computed again gets the same numbers again.

        Args:
            layer: index of the layer in the whole model.
            own: returns the choices in this microbatch, over all ranks with other tokens.
        """
        if layer not in self._with_own:
            times_e = own()
            if layer in self._so_far:
                times_e = times_e + self._so_far[layer]
            self._so_far[layer] = self._with_own[layer] = times_e
        return self._with_own[layer]

    def close(self) -> tuple[list[LeftLoss], list[LeftLoad]]:
        """Return losses and loads in the order in which they were left, and drop all later ones."""
        left = self._losses, self._loads
        self._losses, self._loads, self.is_open = [], [], False
        return left


@runtime_checkable
class LeavesLosses(Protocol):
    """A part of a layer that leaves losses, or the load of its experts.

    All ranks must know beforehand which figures an iteration has.
    """

    @property
    def losses_left(self) -> Sequence[str]:
        """The names of the losses that the part leaves in every forward pass of training."""
        ...

    @property
    def leaves_load(self) -> bool:
        """Whether the part leaves the load of experts in every forward pass of training."""
        ...
