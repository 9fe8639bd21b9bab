"""The interface of a rank's passes, as the executor and the communicator use it."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from megatron.layers.vocabulary.output_s import Merged
from megatron.runtime.store import ActivationStore
from megatron.schedules.passes import Pass, PassKind


class Passes(Protocol):
    """The passes of one rank: ``StagePasses`` computes them, others emulate them.

    Attributes:
        rank: pipeline rank.
        store: holds the inputs of passes and the values that they leave for others.
        table: the function of every kind of pass.
        depths: further tokens that every token predicts besides the next one, in this iteration.
    """

    rank: int
    store: ActivationStore
    table: Mapping[PassKind, Callable[[Pass], None]]

    @property
    def depths(self) -> int:
        """See above."""
        ...

    def gradient_after_merge(self, i: int, state: Any, merged: Merged) -> Tensor:
        """Return this rank's part of the output layer's input gradient, for C1 to sum.

        Args:
            i: microbatch.
            state: the state that S left.
            merged: statistics over the whole vocabulary.
        """
        ...
