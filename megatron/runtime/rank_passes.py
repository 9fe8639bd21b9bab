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
        depths: number of further tokens that every token predicts in this iteration.
    """

    rank: int
    store: ActivationStore
    table: Mapping[PassKind, Callable[[Pass], None]]

    @property
    def depths(self) -> int:
        """See the class."""
        ...

    def merge(self, i: int, state: Any, statistics_p4n: Tensor) -> tuple[Merged, Tensor | None]:
        """Merge the statistics of all shards; C1 calls this between its collectives.

        Args:
            i: unit, which is a microbatch or a slice of one.
            state: the state that S left.
            statistics_p4n: of all shards.

        Returns:
            Statistics over the whole vocabulary, and this rank's part of the gradient of the output
            layer's input, which C1 sums. The part is ``None`` if the treatment's S does not form
            it.
        """
        ...
