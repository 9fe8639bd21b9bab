#!/usr/bin/env python3
"""Emulate a cluster: the real executor, program and gloo groups, with passes that sleep their time.

python tools/emulate.py --csv docs/reference/a100_8gpu_seq2048.csv --rows 1,6 --microbatches 32
python tools/emulate.py --measured-costs costs.json --vocab-parallel vocab-2 -p 8 -m 24
python tools/emulate.py --csv runs.csv --rows 3 -m 16 --jitter 0.5 --iterations 200
python tools/emulate.py --costs costs.json -p 8 --cases slices.txt
python tools/emulate.py --measured-costs costs.json --grid d=4,p=4 --overlap-grad-reduce

Every rank is a process of this machine with two busy threads, one for passes and one for
collectives; with replicas there is a third, for what they exchange, and with --offload-chunk-num
one for the copies to and from the host. Each thread should have a core.
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

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.commands.arguments import PLAN_GROUPS, PlanFlags, SizeFlags, request_of
    from megatron.commands.replica_flags import OverlapFlags
    from megatron.flags.command import read
    from megatron.flags.declare import flag
    from megatron.flags.groups import Flags, all_declarations, options_of
    from megatron.flags.ranges import COUNT, NOT_NEGATIVE, POSITIVE, SHARE
    from megatron.flags.readable import told_as_error
    from megatron.native.files import read_text
    from megatron.schedules.block_options import BlockOptions
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
"""Threads of a rank that work at the same time; replicas have one more, and so have copies."""
NAME_WIDTH = 41
"""Of the longest name of a case, with slices and offload."""
HEADER = f"{'row what':<{NAME_WIDTH}} simulated ms emulated ms to simulated"
WARM_UP = 0.1
"""Memory should no longer grow after this share of the iterations with jitter."""


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class EmulateFlags:
    """What is emulated, and how."""

    csv: Path | None = flag(None,
        "Table of measured runs: see tools/predictions/measured.py. Ranks and microbatches are as "
        "measured if no flag gives them.", metavar="FILE.csv", unset="none",
        excludes="--measured-costs")
    measured_costs: Path | None = flag(None,
        "Times of passes and communications: see megatron/simulator/costs/cost_file.py. The flags "
        "of the plan go with them.", names=PLAN_FLAGS["costs"][1:], metavar="FILE.json",
        unset="none")
    rows: tuple[str, ...] = flag((), "Runs of --csv, counted from 1, as in 1,3-5.",
        metavar="ROW ...", unset="all")
    grid: GridSize | None = flag(None,
        "Replicas d of a pipeline of p ranks, as in d=4,p=4; takes the place of -p.",
        metavar="d=D,p=P", reads=parse_grid, unset="one replica")
    offload_chunk_num: int | None = flag(None,
        "Chunks of every rank whose activations wait on the host between F and backward. The costs "
        "have the times of the copies, O and L.", COUNT, unset="none")
    cases: Path | None = flag(None,
        "File whose lines have the flags of one plan each, in addition to those given or in place "
        "of them: emulate all of them.", metavar="FILE.txt", unset="one plan")
    unit: float | None = flag(None, "Seconds of a unit of time in the costs.", POSITIVE, unset="1")
    rounds: int = flag(3, "The median counts.", COUNT)
    slow_down: float | None = flag(None, "Take K times as long for everything.", COUNT,
        metavar="K", unset="threads to a core, at least 1")
    realtime: bool = flag(False,
        "Give the ranks precedence over all else on this machine (Linux, privileged).")
    jitter: float = flag(0.0, "Then again: passes take up to this share more or less.", SHARE)
    iterations: int | None = flag(None, "With jitter.", COUNT, unset=str(JITTERED_ITERATIONS))
    seed: int | None = flag(None, "Of the jitter.", NOT_NEGATIVE, unset="0")
# fmt: on

GROUPS = (EmulateFlags, *PLAN_GROUPS, OverlapFlags)


@dataclass(frozen=True)
class Emulation:
    """The result of a case.

    Attributes:
        seconds: time of the iteration, the median of the rounds.
        overheads: seconds that the executor itself took for every pass.
        checksums: checksum of every rank, the same in all rounds.
    """

    seconds: float
    overheads: Sequence[float]
    checksums: Sequence[int]


def emulate(cluster: Cluster, case: EmulatedCase, rounds: int, slow_down: float) -> Emulation:
    """Run ``case`` on ``cluster``.

    Args:
        cluster: cluster with as many ranks as the case.
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
    flags: EmulateFlags,
) -> str:
    """Run ``case`` with jitter and report on it.

    Args:
        cluster: cluster with as many ranks as the case.
        case: the case to run.
        expected: the checksum of every rank without jitter.
        slow_down: factor by which all times are longer than they should be.
        flags: the amount of jitter, the number of iterations and the seed.

    Raises:
        ClusterError: if a rank fails, or an iteration's results differ from those without jitter.
    """
    count, jitter = flags.iterations or JITTERED_ITERATIONS, flags.jitter
    job = replace(_job(case, slow_down, count), jitter=jitter, seed=flags.seed or 0)
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
    """Return the seconds of every iteration, until the last rank ends."""
    return list(map(max, zip(*(outcome.seconds for outcome in outcomes), strict=True)))


def _refuse_changes(outcomes: Sequence[Outcome], expected: Sequence[int]) -> None:
    for rank, (outcome, checksum) in enumerate(zip(outcomes, expected, strict=True)):
        for iteration, other in enumerate(outcome.checksums):
            if other != checksum:
                raise ClusterError(
                    f"rank {rank} has come to {other} in iteration {iteration}, and should have to "
                    f"{checksum}: a message has not come where it belongs"
                )


def parse_arguments(argv: Sequence[str] | None) -> Flags:
    """Read the command line."""
    return read(argv, __doc__, *GROUPS, rules=(check_source, check_unused))


def check_source(flags: Flags) -> Iterator[str]:
    """Yield a fault if no flag says which runs or costs to emulate."""
    if flags[EmulateFlags].csv is None and flags[EmulateFlags].measured_costs is None:
        yield "nothing to emulate: give --csv FILE.csv or --measured-costs FILE.json"


def check_unused(flags: Flags) -> Iterator[str]:
    """Yield the flags that have no effect together with the others."""
    own, declared = flags[EmulateFlags], all_declarations(GROUPS)
    values = dict(_values(flags))
    replicas = 1 if own.grid is None else own.grid.replicas
    of_plan, of_overlap = (
        all_declarations((PlanFlags, BlockOptions)),
        all_declarations((OverlapFlags,)),
    )
    for options, belongs_to, idle in (
        (
            (*of_plan, "--offload-chunk-num", "--cases", "--unit", "--grid"),
            "--measured-costs: the runs of --csv have all that",
            own.csv is not None,
        ),
        (("--rows",), "--csv: measured costs are of one schedule", own.csv is None),
        (
            ("--iterations", "--seed"),
            "--jitter: without, --rounds says how often",
            not own.jitter,
        ),
        (
            ("--pipeline-model-parallel-size",),
            "--measured-costs without --grid",
            own.grid is not None,
        ),
        (of_overlap, "--grid with several replicas", replicas == 1),
    ):
        for option in options if idle else ():
            if declared[option].asks(values[option]):
                given = declared[option].shown(values[option])
                yield f"{given} goes with {belongs_to}; leave it out"


def _values(flags: Flags) -> Iterator[tuple[str, object]]:
    for group in GROUPS:
        yield from options_of(group, flags[group])


def _lines(path: Path | None) -> list[list[str]]:
    """Return the words of every line of a file of cases; without a file one line without words.

    Raises:
        ValueError: if the file cannot be read.
    """
    if path is None:
        return [[]]
    try:
        lines = [shlex.split(line, comments=True) for line in read_text(path).splitlines()]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return [line for line in lines if line]


def read_cases(words: Sequence[str]) -> list[EmulatedCase]:
    """Return the cases that the words of a command line ask for.

    Raises:
        ValueError: if a file holds no runs or costs, or a plan cannot be made.
    """
    flags = parse_arguments(words)
    own, size = flags[EmulateFlags], flags[SizeFlags]
    if own.csv is not None:
        ranks = size.pipeline_model_parallel_size
        return measured_cases(own.csv, own.rows or None, size.microbatches, ranks)
    assert own.measured_costs is not None, "one of both is given"
    replicas, ranks = own.grid or (1, size.pipeline_model_parallel_size)
    request = request_of(flags.replaced(replace(size, pipeline_model_parallel_size=ranks)))
    overlap, offloaded = flags[OverlapFlags].overlap, own.offload_chunk_num or 0
    unit = own.unit or 1.0
    return [planned_case(request, own.measured_costs, unit, replicas, overlap, offloaded)]


def _line(case: EmulatedCase, done: Emulation) -> str:
    error = 100 * (done.seconds / case.simulated - 1)
    milliseconds = f"{1000 * case.simulated:>12.0f} {1000 * done.seconds:>11.0f}"
    return f"{case.name:<{NAME_WIDTH}} {milliseconds} {error:>+11.2f}%"


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
        ValueError: for flags that make no case.
        ClusterError: if a rank fails, or results change.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    own = parse_arguments(words)[EmulateFlags]
    cases = [case for line in _lines(own.cases) for case in read_cases([*words, *line])]
    done: list[tuple[EmulatedCase, Emulation]] = []
    print(HEADER)
    for (ranks, replicas), alike in groupby(cases, key=lambda case: (case.ranks, case.replicas)):
        group = list(alike)
        copies = any(case.program.plan.offloaded for case in group)
        threads = (THREADS + (replicas > 1) + copies) * ranks * replicas
        slow_down = own.slow_down or max(1.0, threads / (os.cpu_count() or 1))
        pipelines = "" if replicas == 1 else f"{replicas} replicas of "
        print(
            f"{pipelines}{ranks} ranks; everything takes {slow_down:g} times as long, and is "
            "divided by it"
        )
        with Cluster(ranks, own.realtime, replicas=replicas) as cluster:
            for case in group:
                emulation = emulate(cluster, case, own.rounds, slow_down)
                done.append((case, emulation))
                print(_line(case, emulation), flush=True)
                if own.jitter:
                    print(shake(cluster, case, emulation.checksums, slow_down, own), flush=True)
    print(_report(done))


if __name__ == "__main__":
    with told_as_error(ValueError, ClusterError):
        main()
