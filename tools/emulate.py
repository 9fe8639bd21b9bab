#!/usr/bin/env python3
"""Emulate a cluster: the real executor, program and gloo groups, with passes that sleep their time.

python tools/emulate.py --csv docs/reference/a100_8gpu_seq2048.csv --rows 1,6 --microbatches 32
python tools/emulate.py --measured-costs costs.json --vocab-parallel vocab-2 -p 8 -m 24
python tools/emulate.py --csv runs.csv --rows 3 -m 16 --jitter 0.5 --iterations 200
python tools/emulate.py --measured-costs costs.json --grid d=4,p=4 --overlap-grad-reduce

Every rank is a process of this machine with two busy threads, one for passes and one for
collectives; with replicas there is a third, for what they exchange. Each thread should have a core.
With fewer cores the threads would wait for one another, as threads of a real cluster would not. So
with K threads per core (or with --slow-down K) passes and messages take K times their time, and the
time of the iteration is divided by K. The overhead of the executor is that of this machine and does
not depend on K.

With --grid every replica runs the pipeline, and the replicas reduce the gradients of real buckets
(RG), and with a sharded optimizer update (U) and gather (AG) parameters. The buckets hold a number
for each replica; how long they take, the costs say.

What is compared is the executor with the simulator. How far the simulator is from the measured runs
of --csv, tools/reproduce.py says.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.commands.arguments import (
        REQUEST_FIELDS,
        Parser,
        add_plan_flags,
        add_size_flags,
        number,
        request_of,
    )
    from megatron.commands.replica_flags import OVERLAP_FIELDS, add_overlap_flags, overlap_of
    from megatron.schedules.plan_flags import PLAN_FLAGS
    from tools.emulation.cases import (
        EmulatedCase,
        GridSize,
        measured_cases,
        parse_grid,
        planned_case,
    )
    from tools.emulation.cluster import Cluster, ClusterError
    from tools.emulation.rank import EmulatedJob, Outcome


JITTERED_ITERATIONS = 200
THREADS = 2
"""Threads of a rank that work at the same time; replicas have one more."""
HEADER = "row what                            simulated ms emulated ms to simulated"
WARM_UP = 0.1
"""Share of the iterations with jitter after which memory should no longer grow."""


@dataclass(frozen=True)
class Emulation:
    """The result of a case.

    Attributes:
        seconds: time of the iteration, the median of the rounds.
        overheads: for every pass, the seconds that the executor took.
        checksums: for every rank, its checksum, the same in all rounds.
    """

    seconds: float
    overheads: Sequence[float]
    checksums: Sequence[int]


def emulate(cluster: Cluster, case: EmulatedCase, rounds: int, slow_down: float) -> Emulation:
    """Run ``case`` on ``cluster``.

    Args:
        cluster: as many ranks as the case has.
        case: the case to run.
        rounds: number of rounds.
        slow_down: factor by which all times are longer than they should be.

    Raises:
        ClusterError: if a rank fails, or the rounds have different results.
    """
    job = _job(case, slow_down, rounds)
    outcomes = cluster.run(job, case.simulated * slow_down * rounds)
    seconds = median(_iterations(outcomes)) / slow_down
    checksums = [outcome.checksums[0] for outcome in outcomes]
    _refuse_changes(outcomes, checksums)
    return Emulation(seconds, [t for o in outcomes for t in o.overheads], checksums)


def shake(
    cluster: Cluster,
    case: EmulatedCase,
    expected: Sequence[int],
    slow_down: float,
    arguments: argparse.Namespace,
) -> str:
    """Run ``case`` with jitter and report on it.

    Args:
        cluster: as many ranks as the case has.
        case: the case to run.
        expected: the checksum of every rank without jitter.
        slow_down: factor by which all times are longer than they should be.
        arguments: the amount of jitter, the number of iterations and the seed.

    Raises:
        ClusterError: if a rank fails, or an iteration has other results than without jitter.
    """
    count, jitter = arguments.iterations or JITTERED_ITERATIONS, arguments.jitter
    job = replace(_job(case, slow_down, count), jitter=jitter, seed=arguments.seed or 0)
    outcomes = cluster.run(job, case.simulated * slow_down * count * (1 + jitter))
    _refuse_changes(outcomes, expected)
    times = [1000 * seconds / slow_down for seconds in _iterations(outcomes)]
    grown = max(o.peaks[-1] - o.peaks[int(WARM_UP * count)] for o in outcomes) / 2**20
    return (
        f"    {count} iterations with up to {jitter:.0%} jitter: {min(times):.0f} to "
        f"{max(times):.0f} ms, results unchanged, memory of a rank grew by {grown:.1f} MiB at most"
    )


def _job(case: EmulatedCase, slow_down: float, iterations: int) -> EmulatedJob:
    job = EmulatedJob(case.program, case.costs, case.unit * slow_down, iterations)
    if case.buckets is None:
        return job
    buckets = case.buckets.of(case.program.plan)
    return replace(job, buckets=buckets, sharded=case.buckets.overlap.updates)


def _iterations(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the seconds of every iteration, to the end on the last rank."""
    return list(map(max, zip(*(outcome.seconds for outcome in outcomes), strict=True)))


def _refuse_changes(outcomes: Sequence[Outcome], expected: Sequence[int]) -> None:
    for rank, (outcome, checksum) in enumerate(zip(outcomes, expected, strict=True)):
        for iteration, other in enumerate(outcome.checksums):
            if other != checksum:
                raise ClusterError(
                    f"rank {rank} has come to {other} in iteration {iteration}, and should have to "
                    f"{checksum}: a message has not come where it belongs"
                )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    runs = "table of measured runs: see tools/predictions/measured.py"
    source.add_argument("--csv", type=Path, metavar="FILE.csv", help=runs)
    costs = "times of passes and communications: see megatron/simulator/costs/cost_file.py"
    names = PLAN_FLAGS["costs"]
    source.add_argument(*names, dest="costs", type=Path, metavar="FILE.json", help=costs)
    rows = "runs of --csv, counted from 1, as in 1,3-5 (default: all)"
    add("--rows", nargs="+", metavar="ROW", help=rows)
    add_size_flags(add, "; as measured with --csv")
    group = parser.add_argument_group("with --measured-costs")
    add_plan_flags(group.add_argument)
    grid = "replicas d of a pipeline of p ranks, as in d=4,p=4; takes the place of -p"
    group.add_argument("--grid", type=_grid, metavar="d=D,p=P", help=grid)
    add_overlap_flags(group.add_argument)
    unit = "of a unit of time in the costs (default: 1)"
    group.add_argument("--unit", type=_positive, metavar="SECONDS", help=unit)
    add("--rounds", type=number(1), default=3, help="the median counts (default: %(default)s)")
    slow = "take K times as long for everything (default: threads to a core, at least 1)"
    add("--slow-down", type=number(1, float), metavar="K", help=slow)
    realtime = "give the ranks precedence over all else on this machine (Linux, privileged)"
    add("--realtime", action="store_true", help=realtime)
    add(
        "--jitter", type=_share, default=0.0, help="then again: passes take up to this more or less"
    )
    iterations = f"with jitter (default: {JITTERED_ITERATIONS})"
    add("--iterations", type=number(1), help=iterations)
    add("--seed", type=number(0), help="of the jitter (default: 0)")
    return parser.parse_args(argv)


def _share(text: str) -> float:
    value = number(0, float)(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"'{text}': give a share below 1")
    return value


def _grid(text: str) -> GridSize:
    try:
        return parse_grid(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> float:
    value = number(0, float)(text)
    if not value:
        raise argparse.ArgumentTypeError(f"'{text}': give a number above 0")
    return value


def refuse_unused(arguments: argparse.Namespace) -> None:
    """Refuse flags that have no effect together with the others.

    Raises:
        ValueError: if there is such a flag; the message names it and the flag it belongs to.
    """
    of_plan = ({*REQUEST_FIELDS} - {"ranks", "microbatches"}) | {"unit", "grid"}
    replicas = 1 if arguments.grid is None else arguments.grid.replicas
    for names, belongs_to, idle in (
        (of_plan, "--measured-costs: the runs of --csv have all that", arguments.csv is not None),
        (("rows",), "--csv: measured costs are of one schedule", arguments.costs is not None),
        (
            ("iterations", "seed"),
            "--jitter: without, --rounds says how often",
            not arguments.jitter,
        ),
        (("ranks",), "--measured-costs without --grid", arguments.grid is not None),
        (OVERLAP_FIELDS, "--grid with several replicas", replicas == 1),
    ):
        for name in names:
            value = getattr(arguments, name)
            if idle and value is not None and value is not False:
                given = " ".join(value) if name == "rows" else value
                flag = PLAN_FLAGS.get(name, ("--" + name.replace("_", "-"),))[0]
                raise ValueError(f"{flag} {given} goes with {belongs_to}; leave it out")


def read_cases(arguments: argparse.Namespace) -> list[EmulatedCase]:
    """Return the cases that the flags ask for.

    Raises:
        ValueError: if a file holds no runs or costs, or a plan cannot be made.
    """
    if arguments.csv is not None:
        return measured_cases(
            arguments.csv, arguments.rows, arguments.microbatches, arguments.ranks
        )
    replicas, ranks = arguments.grid or GridSize(1, arguments.ranks)
    arguments = argparse.Namespace(**{**vars(arguments), "ranks": ranks})
    return [
        planned_case(
            request_of(arguments),
            arguments.costs,
            arguments.unit or 1.0,
            replicas,
            overlap_of(arguments),
        )
    ]


def _line(case: EmulatedCase, done: Emulation) -> str:
    error = 100 * (done.seconds / case.simulated - 1)
    milliseconds = f"{1000 * case.simulated:>12.0f} {1000 * done.seconds:>11.0f}"
    return f"{case.name} {milliseconds} {error:>+11.2f}%"


def _report(done: Sequence[tuple[EmulatedCase, Emulation]]) -> str:
    overheads = sorted(t for _, emulation in done for t in emulation.overheads)
    most = overheads[int(0.99 * len(overheads))]
    error = mean(abs(emulation.seconds / case.simulated - 1) for case, emulation in done)
    return (
        f"executor overhead: {1e6 * median(overheads):.0f} us a pass in the median, "
        f"{1e6 * most:.0f} us in 99 % of them at most\n"
        f"mean abs error to simulated: {100 * error:.2f} %"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        ValueError: for arguments that make no case.
        ClusterError: if a rank fails, or results change.
    """
    arguments = parse_arguments(argv)
    refuse_unused(arguments)
    cases = read_cases(arguments)
    done: list[tuple[EmulatedCase, Emulation]] = []
    print(HEADER)
    for (ranks, replicas), group in groupby(cases, key=lambda case: (case.ranks, case.replicas)):
        threads = (THREADS + (replicas > 1)) * ranks * replicas
        slow_down = arguments.slow_down or max(1.0, threads / (os.cpu_count() or 1))
        pipelines = "" if replicas == 1 else f"{replicas} replicas of "
        print(
            f"{pipelines}{ranks} ranks; everything takes {slow_down:g} times as long, and is "
            "divided by it"
        )
        with Cluster(ranks, arguments.realtime, replicas=replicas) as cluster:
            for case in group:
                emulation = emulate(cluster, case, arguments.rounds, slow_down)
                done.append((case, emulation))
                print(_line(case, emulation), flush=True)
                if arguments.jitter:
                    print(
                        shake(cluster, case, emulation.checksums, slow_down, arguments), flush=True
                    )
    print(_report(done))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, ClusterError) as error:
        sys.exit(f"error: {error}")
