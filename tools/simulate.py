#!/usr/bin/env python3
"""Simulate a schedule: how long it takes, how much of that is idle, how much is in flight.

python tools/simulate.py --vocab vocab-2 -p 4 -m 8 --output-layer 1.2 --text
python tools/simulate.py --vocab none -p 4 -m 8 --cost F=1,B=2:2:2:4.4,X=0.1 --draw plan.svg
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.schedules.check import in_flight
from megatron.schedules.lower import lower
from megatron.schedules.needs import COMM_KINDS, CommKind
from megatron.schedules.passes import PASS_KINDS, PassKind
from megatron.schedules.plan import VOCABULARY_BARRIERS
from megatron.schedules.registry import SCHEDULES, VOCABULARY_TREATMENTS, make_plan
from megatron.schedules.timing import UNIT_COSTS
from megatron.simulator.picture import Panel, draw_svg
from megatron.simulator.simulate import Costs, Timeline, simulate
from megatron.simulator.text import draw_text

PassTimes = Mapping[PassKind, float | Sequence[float]]


@dataclass(frozen=True)
class Case:
    """What is simulated; times have no unit but that of the costs.

    Attributes:
        schedule: a name of ``SCHEDULES``.
        vocab: a name of ``VOCABULARY_TREATMENTS``.
        ranks: pipeline ranks p.
        microbatches: microbatches m of an iteration.
        output_layer: time of the whole output layer's forward; its backward takes twice that.
        passes: times of passes, in place of the usual: a stage's F takes 1 and its B 2, and the
            output layer is added where it runs. One number, or one for each rank.
        comms: times of communications; those not named take none.
    """

    schedule: str
    vocab: str
    ranks: int
    microbatches: int
    output_layer: float = 1.0
    passes: PassTimes = field(default_factory=dict)
    comms: Mapping[CommKind, float] = field(default_factory=dict)

    def run(self) -> tuple[Timeline, list[float]]:
        """Return the timeline, and every rank's peak of microbatches in flight.

        Raises:
            ValueError: for an unknown name, a count below 1, or times for another count of ranks.
        """
        for kind, times in self.passes.items():
            if isinstance(times, Sequence) and len(times) != self.ranks:
                raise ValueError(
                    f"{kind} has {len(times)} times for {self.ranks} ranks: give one, or one a rank"
                )
        costs = Costs({**UNIT_COSTS, **self._output_layer(), **self.passes}, self.comms)
        plan = make_plan(self.schedule, self.vocab, self.ranks, self.microbatches, costs.of_pass)
        return simulate(lower(plan, costs.of_pass), costs), in_flight(plan)

    def _output_layer(self) -> PassTimes:
        """Return the times of the passes that hold the output layer (DESIGN section 3)."""
        share = self.output_layer / max(self.ranks, 1)  # make_plan refuses 0 ranks
        barriers = VOCABULARY_BARRIERS.get(self.vocab)
        if barriers == 2:  # S: the logits; T: both gradients
            return {"S": share, "T": 2 * share}
        if barriers == 1:  # S: the logits and the input's gradient; T: the weight's
            return {"S": 2 * share, "T": share}
        here = [float(rank == self.ranks - 1) for rank in range(self.ranks)]
        return {
            "F": [UNIT_COSTS["F"] + self.output_layer * last for last in here],
            "B": [UNIT_COSTS["B"] + 2 * self.output_layer * last for last in here],
        }


def parse_costs(text: str) -> tuple[PassTimes, Mapping[CommKind, float]]:
    """Read ``F=1,B=2:2:4,C1=0.1``: the times of passes and those of communications.

    Raises:
        ValueError: if a word is no ``KIND=TIME``, or a time is negative or no number.
    """
    passes: dict[PassKind, float | Sequence[float]] = {}
    comms: dict[CommKind, float] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        times = [_parse_time(word, part) for part in value.split(":")]
        pass_kind = next((kind for kind in PASS_KINDS if kind == name), None)
        comm_kind = next((kind for kind in COMM_KINDS if kind == name), None)
        if pass_kind is not None:
            passes[pass_kind] = times if len(times) > 1 else times[0]
        elif comm_kind is not None and len(times) == 1:
            comms[comm_kind] = times[0]
        else:
            raise ValueError(
                f"'{word}' is no cost: write KIND=TIME with a kind of {' '.join(PASS_KINDS)} "
                f"{' '.join(COMM_KINDS)}; a pass may have one time for each rank, as in F=1:1:2"
            )
    return passes, comms


def _parse_time(word: str, text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not 0 <= time < math.inf:
        raise ValueError(f"'{word}' is no cost: '{text}' is not a time of 0 or more")
    return time


def summary(case: Case, timeline: Timeline, held: Sequence[float]) -> dict[str, object]:
    """Return the figures of a simulation, ready for JSON."""
    return {
        "schedule": case.schedule,
        "vocab": case.vocab,
        "ranks": case.ranks,
        "microbatches": case.microbatches,
        "end": timeline.end,
        "bubble_rate": timeline.bubble_rate(),
        "bubble_rate_makespan": timeline.bubble_rate_makespan(),
        "work": [timeline.work(rank) for rank in range(case.ranks)],
        "in_flight": list(held),
    }


def _report(case: Case, timeline: Timeline, held: Sequence[float]) -> str:
    heading = (
        f"{case.schedule}, vocabulary {case.vocab}, p = {case.ranks}, m = {case.microbatches}: "
        f"ends at {timeline.end:.4g}, {timeline.bubble_rate():.1%} idle"
    )
    rows = (
        f"  rank {rank}: works {timeline.work(rank):.4g}, holds up to {peak:g} microbatches"
        for rank, peak in enumerate(held)
    )
    return "\n".join([heading, *rows])


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--schedule", default="1f1b", choices=sorted(SCHEDULES), help="default: %(default)s")
    add("--vocab", default="none", choices=VOCABULARY_TREATMENTS, help="default: %(default)s")
    add("-p", "--ranks", type=int, default=4, help="pipeline ranks (default: %(default)s)")
    add("-m", "--microbatches", type=int, default=8, help="of one iteration (default: %(default)s)")
    layer = "forward of the whole output layer; a stage's F takes 1 (default: %(default)s)"
    add("--output-layer", default="1", metavar="TIME", help=layer)
    cost = f"times of passes ({' '.join(PASS_KINDS)}) and communications ({' '.join(COMM_KINDS)})"
    add("--cost", metavar="KIND=TIME,...", help=cost)
    add("--text", action="store_true", help="draw the timeline as text")
    add("--draw", type=Path, metavar="FILE.svg", help="draw the timeline as a picture")
    add("--json", action="store_true", help="print the figures and all spans as JSON instead")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        ValueError: for arguments that make no simulation.
    """
    arguments = _parse_arguments(argv)
    passes, comms = parse_costs(arguments.cost) if arguments.cost else ({}, {})
    case = Case(
        arguments.schedule,
        arguments.vocab,
        arguments.ranks,
        arguments.microbatches,
        _parse_time(f"--output-layer {arguments.output_layer}", arguments.output_layer),
        passes,
        comms,
    )
    timeline, held = case.run()
    report = _report(case, timeline, held)
    if arguments.json:
        spans = [span._asdict() for span in timeline.spans]
        print(json.dumps({**summary(case, timeline, held), "spans": spans}, indent=1))
    else:
        print(report)
        if arguments.text:
            print(draw_text(timeline))
    if arguments.draw:
        arguments.draw.write_text(draw_svg([Panel(report.splitlines()[0], timeline)]))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
