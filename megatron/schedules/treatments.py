"""The treatments of the vocabulary: the ways to run the input and output layer, and their facts.

All code that needs a fact about a treatment asks its ``Treatment`` object. To add a treatment, add
a row to ``TREATMENTS``: the flag offers every row. If its barriers carry a new payload, add the
payload with its entry in ``FP32_OF_A_TOKEN``, one entry to ``runtime/communicator.py``, and one to
``simulator/costs/dense_gpt.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from megatron.schedules.passes import PassKind

BarrierKind = Literal["C1", "C2", "C3"]

Payload = Literal["statistics", "maximum", "sums", "gradient"]
"""What a barrier moves: the statistics of every shard, which each rank merges; the maximum or the
sums over all shards; or the sum of the shards' input gradients, which goes to the last stage."""

FP32_OF_A_TOKEN: Final[Mapping[Payload, int]] = {
    "statistics": 3,
    "maximum": 1,
    "sums": 2,
    "gradient": 0,
}
"""Numbers in fp32 of a payload for every token, in the runs of arXiv 2411.05288.

They are maximum, sum of exponentials and target's logit. (This program adds the sum of logits.) The
gradient has none: it is a vector of the hidden size, as large as activations are."""


@dataclass(frozen=True)
class Barrier:
    """A collective of the output layer that T, or the last stage's B, waits for.

    Attributes:
        kind: its kind of communication.
        after: the pass whose result each rank contributes.
        carries: the payloads that it moves, in order.
    """

    kind: BarrierKind
    after: PassKind
    carries: tuple[Payload, ...]


@dataclass(frozen=True)
class Treatment:
    """How the vocabulary layers are run.

    Attributes:
        name: as the flags and plan files spell it.
        barriers: the collectives between the last stage's F and its B, in order. Empty if the
            first and the last stage hold the whole vocabulary layers.
        synchronous: every rank waits at once for the output layer's collectives and for C0, the
            broadcast of its input; it runs no other pass meanwhile.
        redistributed: the first and the last stage get fewer transformer layers, to make up for
            the time of the vocabulary layers.
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
        """The treatment that a plan records: ``none`` for redis, because a plan has no layers."""
        return self if self.is_sharded else TREATMENTS["none"]

    @property
    def delay(self) -> int:
        """Intervals by which the barriers delay the backwards: one for each barrier.

        Each of these intervals means one more microbatch in flight.
        """
        return len(self.barriers)

    @property
    def output_passes(self) -> tuple[PassKind, ...]:
        """Passes of the output layer on every rank, in order; none if the layer is not split."""
        if not self.is_sharded:
            return ()
        return tuple(kind for kind in _OUTPUT_PASSES if kind in self.contributing or kind == "T")

    @property
    def passes(self) -> tuple[PassKind, ...]:
        """All passes that every rank runs for its shard of the vocabulary."""
        return (*self.output_passes, "IF", "IB") if self.is_sharded else ()

    @property
    def maximum_first(self) -> bool:
        """Whether the maximum over all shards is known before any exponential is computed.

        If so, S computes the logits, and E turns them into exponentials.
        """
        return "E" in self.output_passes

    @property
    def gradient_pass(self) -> PassKind:
        """The pass that computes a shard's part of the input gradient: S (Algorithm 2) or T.

        For an output layer that is not split it is S, as in Algorithm 2.
        """
        if not self.is_sharded:
            return "S"
        return next(b.after for b in self.barriers if "gradient" in b.carries)

    @property
    def products(self) -> Mapping[PassKind, int]:
        """How many of the output layer's three matrix products each of its passes computes.

        S computes the logits and T the weight gradient (arXiv 2411.05288, algorithms 1 and 2).
        """
        early = self.gradient_pass == "S"
        return {"S": 1 + early, "E": 0, "T": 2 - early}

    def products_of(self, kind: PassKind, *, recompute: bool = False) -> int:
        """Return how many of the output layer's products a pass computes.

        Args:
            kind: a pass of the output layer.
            recompute: whether T computes the logits again, because they are not kept until T.
        """
        return self.products.get(kind, 0) + (recompute and kind == "T")

    def barrier_before(self, kind: PassKind) -> Barrier:
        """Return the barrier that a pass of the output layer after S waits for.

        If a barrier follows the pass, the result is the barrier before that barrier; otherwise it
        is the last barrier.
        """
        own = (i for i, barrier in enumerate(self.barriers) if barrier.after == kind)
        return self.barriers[next(own, len(self.barriers)) - 1]

    @property
    def contributing(self) -> set[PassKind]:
        """Passes of the output layer that come before a barrier, so that every B waits for them."""
        return {barrier.after for barrier in self.barriers}


_OUTPUT_PASSES: Final[tuple[PassKind, ...]] = ("S", "E", "T")

_TWO_BARRIERS: Final = (
    # T needs m and s to form softmax_k. Only then are there parts of ∇X for C2 to sum, so the last
    # stage's B waits for both barriers (arXiv 2411.05288, section 4, Algorithm 1).
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
        # ∇X is linear in A and D, which S forms without m and s. So C1 gathers the statistics
        # first, scales by them, and sums ∇X at once: no B waits for T (section 4, Algorithm 2).
        Treatment("vocab-2", (Barrier("C1", "S", ("statistics", "gradient")),)),
        Treatment("interlaced", _TWO_BARRIERS, synchronous=True),
    )
}
"""Every treatment by its name (arXiv 2411.05288, section 4; interlaced: OSDI'24, nnScaler).

Algorithm 2 (vocab-2) has only the barrier C1, and Algorithm 1 (vocab-1) has C1 and C2. The naive
order has one barrier each for the maximum, the sum and the gradient. Interlaced is Algorithm 1
without other passes between its own."""
