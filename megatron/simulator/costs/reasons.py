"""The seconds of a work by their reasons: kernels by kind, and waits for collectives by axis.

A price is asked again for parts of the work, so no formula of it stands here a second time.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from megatron.simulator.costs.count import Begin, Collective, CountedAxis, Launch, Work
from megatron.simulator.costs.counted_costs import Price

WorkReason = Literal[
    "products", "attention", "other kernels", "tensor", "context", "experts", "vocabulary"
]
"""Kernels: matrix products, attention in one kernel, and all others, which move bytes; or waiting
for a collective of these ranks."""

WORK_REASONS: Final[tuple[WorkReason, ...]] = (
    *("products", "attention", "other kernels"),
    *("tensor", "context", "experts", "vocabulary"),
)

_AXES: Final[Mapping[CountedAxis, WorkReason]] = {
    "tensor": "tensor",
    "context": "context",
    "context_heads": "context",
    "context_ring": "context",
    "column": "vocabulary",
    "experts": "experts",
    "expert_tensor": "experts",
}


class ByReason:
    """A price taken apart: the seconds of every work by reason.

    Args:
        price: the price, which must add up the kernels of a work that no communication is beside.
    """

    def __init__(self, price: Price) -> None:
        self._price = price
        self._known: dict[int, tuple[Work, Mapping[WorkReason, float]]] = {}

    def of(self, work: Work) -> Mapping[WorkReason, float]:
        """Return the seconds of a work by reason; they add up to the price of the work."""
        if id(work) not in self._known:  # the work is kept, so that no other has its identity
            self._known[id(work)] = work, self._spent(work)
        return self._known[id(work)][1]

    def _spent(self, work: Work) -> Mapping[WorkReason, float]:
        whole, found = self._price.seconds(work), defaultdict[WorkReason, float](float)
        for launch in work.launches:
            found[_kind(launch)] += self._price.seconds(Work((launch,)))
        waits = whole - sum(found.values())
        alone, beside = self._exchanges(_alone(work)), self._exchanges(_begun(work))
        exposed = min(max(waits, 0.0), sum(alone.values())) if beside else max(waits, 0.0)
        _share(found, alone, exposed)
        _share(found, beside, max(waits, 0.0) - exposed)
        left = whole - sum(found.values())
        if left > 0:
            found["other kernels"] += left
        elif total := sum(found.values()):
            found = defaultdict(float, {why: own * whole / total for why, own in found.items()})
        return found

    def _exchanges(self, collectives: Iterator[Collective]) -> Mapping[WorkReason, float]:
        """Return the seconds of collectives by themselves, one after the other."""
        found = defaultdict[WorkReason, float](float)
        for own in collectives:
            found[_AXES[own.axis]] += self._price.seconds(Work((own,)))
        return found


class Only:
    """The price that counts one reason alone, and messages and copies not at all."""

    products_alone: Final = False

    def __init__(self, spent: ByReason, reason: WorkReason) -> None:
        self._spent, self._reason = spent, reason

    def seconds(self, work: Work) -> float:
        """Return the seconds of a work for this reason."""
        return self._spent.of(work).get(self._reason, 0.0)

    def message(self, size: float, *, crossing: bool) -> float:
        """Return 0."""
        return 0.0

    def copy(self, size: float) -> float:
        """Return 0."""
        return 0.0

    def crowding(self, axis: CountedAxis, ranks: int) -> float:
        """Return 0."""
        return 0.0


def _kind(launch: Launch) -> WorkReason:
    if launch.product is not None:
        return "products"
    return "attention" if launch.flops else "other kernels"


def _alone(work: Work) -> Iterator[Collective]:
    """Yield the collectives for which the work waits at once."""
    return (step for step in work.steps if isinstance(step, Collective))


def _begun(work: Work) -> Iterator[Collective]:
    """Yield the collectives that are under way beside kernels of the work."""
    begins = (step for step in work.steps if isinstance(step, Begin))
    return (own for step in begins for own in step.collectives)


def _share(
    found: dict[WorkReason, float], among: Mapping[WorkReason, float], seconds: float
) -> None:
    """Add seconds to reasons, in proportion to their own."""
    total = sum(among.values())
    for reason, own in among.items():
        found[reason] += seconds * own / total if total else 0.0
