"""The treatments of the vocabulary, and all that is to be known of each.

Whoever needs a fact about a treatment asks its object; nobody else counts barriers. To add one, add
a row to ``TREATMENTS``: the flag offers all of them. If its barriers carry something new, that
takes a ``Payload`` with its entry in ``FP32_OF_A_TOKEN``, and one in ``runtime/communicator.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from megatron.schedules.passes import PassKind

BarrierKind = Literal["C1", "C2", "C3"]

Payload = Literal["statistics", "maximum", "sums", "gradient"]
"""What a barrier moves: the statistics of every shard, which each rank merges; the maximum or the
sums over shards; the sum of the shards' input gradients, to the last stage."""

FP32_OF_A_TOKEN: Final[Mapping[Payload, int]] = {
    "statistics": 3,
    "maximum": 1,
    "sums": 2,
    "gradient": 0,
}
"""Numbers in fp32 that a payload has for every token: maximum, sum of exponentials, target's logit.

The gradient has none: it is a vector of the hidden size, as large as activations are."""


@dataclass(frozen=True)
class Barrier:
    """A collective of the output layer that T, or the last stage's B, waits for.

    Attributes:
        kind: its name among the communications.
        after: the pass that each rank contributes.
        carries: what it moves, in order.
    """

    kind: BarrierKind
    after: PassKind
    carries: tuple[Payload, ...]


@dataclass(frozen=True)
class Treatment:
    """What becomes of the vocabulary layers.

    Attributes:
        name: as the flags and plan files spell it.
        barriers: the chain between the last stage's F and its B, in order. Empty where the first
            and the last stage hold the vocabulary layers whole.
        synchronous: every rank waits on the spot for the output layer's collectives, and for the
            broadcast of what they start from.
        redistributed: the first and the last stage have the fewer transformer layers for it.
    """

    name: str
    barriers: tuple[Barrier, ...] = ()
    synchronous: bool = False
    redistributed: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether the vocabulary is split over all ranks of a replica."""
        return bool(self.barriers)

    @property
    def in_plan(self) -> "Treatment":
        """The treatment as a plan knows it: which stage has how many layers is not its business."""
        return self if self.is_sharded else TREATMENTS["none"]

    @property
    def delay(self) -> int:
        """Intervals by which the barriers hold the backwards back, one each.

        So many microbatches more are in flight.
        """
        return len(self.barriers)

    @property
    def output_passes(self) -> tuple[PassKind, ...]:
        """Passes of the output layer on every rank, in order; none where it is not split."""
        if not self.is_sharded:
            return ()
        return tuple(kind for kind in _OUTPUT_PASSES if kind in self._contributing or kind == "T")

    @property
    def passes(self) -> tuple[PassKind, ...]:
        """All passes that every rank runs for its shard of the vocabulary."""
        return (*self.output_passes, "IF", "IB") if self.is_sharded else ()

    @property
    def maximum_first(self) -> bool:
        """Whether the maximum over all shards is known before any exponential is formed.

        S then leaves logits, which E turns into exponentials.
        """
        return "E" in self.output_passes

    @property
    def gradient_pass(self) -> PassKind:
        """The pass that forms a shard's part of the input gradient: S (Algorithm 2) or T.

        A whole output layer forms it at once, as Algorithm 2 does.
        """
        if not self.is_sharded:
            return "S"
        return next(b.after for b in self.barriers if "gradient" in b.carries)

    @property
    def products(self) -> Mapping[PassKind, int]:
        """How many of the output layer's three matrix products each of its passes forms.

        The logits are S's, the weight gradient is T's (DESIGN section 3).
        """
        early = self.gradient_pass == "S"
        return {"S": 1 + early, "E": 0, "T": 2 - early}

    @property
    def gradients_held(self) -> int:
        """Microbatches whose input gradient S has left at most, not yet summed or used.

        A whole output layer finishes it at once; while a barrier with it is under way, S may work
        on the next microbatch.
        """
        if not self.is_sharded:
            return 1
        return 2 if self.gradient_pass == "S" else 0

    def barrier_before(self, kind: PassKind) -> Barrier:
        """Return the barrier that an output layer pass after S waits for.

        It is the one before the pass's own barrier, or the last where the pass has none.
        """
        own = (i for i, barrier in enumerate(self.barriers) if barrier.after == kind)
        return self.barriers[next(own, len(self.barriers)) - 1]

    @property
    def _contributing(self) -> set[PassKind]:
        return {barrier.after for barrier in self.barriers}


_OUTPUT_PASSES: Final[tuple[PassKind, ...]] = ("S", "E", "T")

_TWO_BARRIERS: Final = (
    Barrier("C1", "S", ("statistics",)),
    Barrier("C2", "T", ("gradient",)),
)

TREATMENTS: Final[Mapping[str, Treatment]] = {
    treatment.name: treatment
    for treatment in (
        Treatment("none"),
        Treatment("redis", redistributed=True),
        Treatment(
            "naive",
            (
                Barrier("C1", "S", ("maximum",)),
                Barrier("C2", "E", ("sums",)),
                Barrier("C3", "T", ("gradient",)),
            ),
        ),
        Treatment("vocab-1", _TWO_BARRIERS),
        Treatment("vocab-2", (Barrier("C1", "S", ("statistics", "gradient")),)),
        Treatment("interlaced", _TWO_BARRIERS, synchronous=True),
    )
}
"""Every treatment by its name (arXiv 2411.05288, section 4; interlaced: OSDI'24, nnScaler).

Algorithm 2 (vocab-2) has only the barrier C1, Algorithm 1 (vocab-1) also C2, and the naive order
one each for the maximum, the sum and the gradient. Interlaced is Algorithm 1 with nothing between
its passes."""
