"""What passes of a pair do in turns, from the counts of their work."""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Final, Protocol

from megatron.schedules.pair_steps import (
    PAUSES,
    SWITCHES,
    FindsSteps,
    PairStep,
    PairSteps,
    Sends,
    Waits,
    Works,
)
from megatron.schedules.passes import PassKind
from megatron.simulator.costs.count import (
    NO_PASS,
    Await,
    Begin,
    Collective,
    CountedAxis,
    Launch,
    PassCount,
    Pause,
    RankCount,
    Step,
    Work,
)
from megatron.simulator.costs.in_a_row import in_a_row, leading_begins

REDUCTIONS: Final = ("all_reduce", "reduce_scatter")
"""Collectives that a pass begins and hands over at, where it has work of its own meanwhile."""


class CrowdedPrice(Protocol):
    """Turns counts into times, and knows how communications slow passes."""

    def seconds(self, work: Work) -> float:
        """Return the time of a work."""
        ...

    def crowding(self, axis: CountedAxis, ranks: int) -> float:
        """Return the share by which a collective of an axis slows passes that run meanwhile."""
        ...


def turns_of(
    counts: Sequence[RankCount],
    kinds: Collection[PassKind],
    chunks: int,
    price: CrowdedPrice,
    hidden: Collection[str],
) -> Mapping[PassKind, list[list[FindsSteps]]]:
    """Return what passes do in pairs, by kind, rank and chunk.

    Args:
        counts: the count of every pipeline rank.
        kinds: of passes.
        chunks: model chunks of a rank.
        price: turns counts into times.
        hidden: the axes at whose collectives the passes of a pair switch.
    """
    known: dict[tuple[object, ...], FindsSteps] = {}

    def finder(count: PassCount, kind: PassKind) -> FindsSteps:
        key = kind == "W", *((id(work), times) for work, times in count.parts)
        if key not in known:
            known[key] = _Finder(count, price, hidden, divides=kind == "W")
        return known[key]

    return {
        kind: [
            [finder(count.passes.get((kind, chunk), NO_PASS), kind) for chunk in range(chunks)]
            for count in counts
        ]
        for kind in kinds
    }


class _Finder:
    """Finds the steps of a pass when they are first asked for; arguments as in ``_Steps``."""

    def __init__(
        self, count: PassCount, price: CrowdedPrice, hidden: Collection[str], *, divides: bool
    ) -> None:
        self._count, self._price, self._hidden, self._divides = count, price, hidden, divides
        self._found: PairSteps | None = None

    def __call__(self) -> PairSteps:
        if self._found is None:
            works = [work for work, times in self._count.parts for _ in range(times)]
            steps = _Steps(self._price, self._hidden, divides=self._divides)
            self._found = steps.of(in_a_row(works).steps)
        return self._found


class _Steps:
    """Makes the steps of a pass in a pair.

    Args:
        price: see ``turns_of``.
        hidden: see ``turns_of``.
        divides: whether the pass hands over after each product, as a W does.
    """

    def __init__(self, price: CrowdedPrice, hidden: Collection[str], *, divides: bool) -> None:
        self._price, self._hidden, self._divides = price, hidden, divides
        self._steps: list[PairStep] = []
        self._sent = 0
        self._begun: list[int] = []

    def of(self, steps: Sequence[Step]) -> PairSteps:
        """Return the steps of a pass with these counted steps."""
        begins = leading_begins(steps) if self._divides else ()
        for step in begins:
            self._communicate(step)
        self._steps += [SWITCHES] if begins else []
        rest = steps[len(begins) :]
        for are_launches, row in groupby(rest, lambda step: isinstance(step, Launch)):
            if are_launches:
                self._work([step for step in row if isinstance(step, Launch)])
            else:
                for step in row:
                    self._communicate(step)
        if self._steps and self._steps[-1] == SWITCHES:
            self._steps.pop()  # the pass is over
        return PairSteps(tuple(self._steps))

    def _work(self, launches: Sequence[Launch]) -> None:
        """Add kernels; in a W, the other pass goes on after each product."""
        begin = 0
        for end, launch in enumerate(launches, 1):
            if end == len(launches) or (self._divides and launch.flops):
                self._steps.append(Works(self._price.seconds(Work(tuple(launches[begin:end])))))
                begin = end
                if self._divides and launch.flops:
                    self._steps.append(SWITCHES)

    def _communicate(self, step: Step) -> None:
        match step:
            case Collective(axis=axis) if axis in self._hidden:
                self._send((step,))
                self._steps += SWITCHES, Waits(self._sent - 1)
            case Collective():
                self._steps.append(Works(self._price.seconds(Work((step,)))))
            case Begin(collectives):
                self._send(collectives)
                self._begun.append(self._sent - 1)
                if any(own.axis in self._hidden and own.kind in REDUCTIONS for own in collectives):
                    self._steps.append(SWITCHES)
            case Await(later) if later < len(self._begun):
                self._steps.append(Waits(self._begun[-1 - later]))
            case Pause() if "tensor" in self._hidden:
                self._steps.append(PAUSES)
            case _:
                pass  # hosts wait for free

    def _send(self, collectives: Sequence[Collective]) -> None:
        """Add collectives that follow one another as one."""
        seconds = sum(self._price.seconds(Work((own,))) for own in collectives)
        crowds = [self._price.crowding(own.axis, own.ranks) for own in collectives]
        axis = collectives[0].axis if collectives else ""
        self._steps.append(Sends(seconds, axis, max(crowds, default=0.0)))
        self._sent += 1
