#!/usr/bin/env python3
"""Simulate many replicas of a pipeline: how much of their exchange is hidden, by size of buckets.

python tools/replicas_at_scale.py > report.md
python tools/replicas_at_scale.py --pipeline-schedule 1f1b zb-v --replicas 64 --bucket-size 40e6

The exchange is that of a sharded optimizer with both halves overlapped: RG sums gradients in fp32,
AG gathers updated parameters in bf16. Each replica has the same microbatches, however many there
are. Times are those of a dry run.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.flags.command import read
    from megatron.flags.declare import flag
    from megatron.flags.ranges import COUNT, NOT_NEGATIVE, POSITIVE
    from megatron.parallel.settings import ReplicaSettings
    from megatron.planning.forecast_run import RunForecast, forecast_run
    from megatron.planning.run_plan import make_run_plan
    from megatron.run.run_config import RunConfig
    from megatron.schedules.catalogue import SCHEDULES
    from megatron.schedules.plan_flags import PLAN_FLAGS
    from megatron.simulator.costs.gpus import GPUS, gpu
    from tools.pages.tables import table
    from tools.predictions.scenarios import GPT_ON_8


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class ScaleFlags:
    """What is simulated."""

    pipeline_schedule: tuple[str, ...] = flag(tuple(SCHEDULES), "Schedules.", metavar="NAME ...",
        choices=tuple(SCHEDULES), names=PLAN_FLAGS["schedule"][1:])
    replicas: tuple[int, ...] = flag((64, 256, 1024), "Pipelines.", COUNT)
    bucket_size: tuple[float, ...] = flag((1e6, 40e6, 100e6, 200e6, 400e6, 1e9),
        "Sizes of buckets.", COUNT, metavar="PARAMETERS ...")
    bandwidth: tuple[float, ...] = flag((50.0, 12.5), "Of the link between replicas.", POSITIVE,
        metavar="GB/S ...")
    latency: float = flag(10.0, "Of a step between replicas.", NOT_NEGATIVE, metavar="US")
    microbatches: int = flag(16, "Of a replica.", COUNT, names=("-m",))
    gpu: str = flag("H100", "Device.", choices=tuple(GPUS))
# fmt: on


class Case(NamedTuple):
    """One simulation.

    Attributes:
        schedule: name of the schedule.
        bandwidth: bandwidth of the link between replicas, in GB/s.
        replicas: number of replicas d.
        bucket_size: parameters after which a bucket is full.
    """

    schedule: str
    bandwidth: float
    replicas: int
    bucket_size: float


class Found(NamedTuple):
    """The result of a simulation.

    Attributes:
        seconds: seconds of an iteration.
        reduced: share of RG (the reduction of gradients) that is hidden behind passes.
        gathered: share of AG (the gathering of parameters) that is hidden behind passes.
        buckets: most buckets of a rank.
    """

    seconds: float
    reduced: float
    gathered: float
    buckets: int


Results = dict[Case, Found]


def one_replica(schedule: str, options: ScaleFlags) -> RunConfig:
    """Return a run of a single replica."""
    job = GPT_ON_8._replace(gpu=options.gpu, schedule=schedule, vocabulary=256_000)
    return job._replace(samples=options.microbatches).config


def among(config: RunConfig, case: Case, latency: float) -> RunConfig:
    """Return a run of the replicas of ``case``, each with the microbatches of ``config``.

    Args:
        config: run of one replica.
        case: number of replicas, their link and their buckets.
        latency: latency of a step between replicas, in microseconds.
    """
    assert config.dry_run is not None, "nothing is started here"
    replicas = ReplicaSettings(
        size=case.replicas,
        overlap=True,
        ddp_bucket_size=int(case.bucket_size),
        shard_optimizer=True,
        overlap_gather=True,
    )
    train = config.train
    batch = train.global_batch_size * case.replicas
    return replace(
        config,
        parallel=replace(config.parallel, replicas=replicas),
        train=replace(train, global_batch_size=batch, replicas=case.replicas),
        dry_run=replace(
            config.dry_run,
            dry_run_replica_bandwidth=case.bandwidth,
            dry_run_replica_latency=latency,
        ),
    )


def simulated(options: ScaleFlags) -> Results:
    """Return the results of all cases that the flags ask for."""
    found: Results = {}
    for schedule in options.pipeline_schedule:
        config = one_replica(schedule, options)
        plan = make_run_plan(config)
        for bandwidth in options.bandwidth:
            for replicas in options.replicas:
                for size in options.bucket_size:
                    case = Case(schedule, bandwidth, replicas, size)
                    run = among(config, case, options.latency)
                    found[case] = _found(forecast_run(run, plan, gpu(options.gpu)))
        print(schedule, file=sys.stderr, flush=True)
    return found


def _found(forecast: RunForecast) -> Found:
    assert forecast.exchanges is not None, "there are replicas"
    hidden = forecast.hidden
    most = max(map(len, forecast.exchanges.buckets))
    return Found(forecast.outcome.seconds, hidden["RG"].share, hidden["AG"].share, most)


def report(found: Results, options: ScaleFlags) -> Iterator[str]:
    """Yield the tables: first by size of the buckets, then by schedule."""
    sizes = [f"{size / 1e6:g}M" for size in options.bucket_size]
    for bandwidth in options.bandwidth:
        yield f"\n## {bandwidth:g} GB/s and {options.latency:g} us a step\n"
        yield "An iteration is longer than with the best size by, in the mean over schedules:\n"
        yield from table(("replicas", *sizes), _losses(found, bandwidth, options))
        for replicas in options.replicas:
            yield f"\n{replicas} replicas: seconds of an iteration (share of RG hidden, of AG)\n"
            rows = _by_schedule(found, bandwidth, replicas, options)
            yield from table(("schedule", *sizes), rows)


def _losses(found: Results, bandwidth: float, options: ScaleFlags) -> Iterator[list[str]]:
    for replicas in options.replicas:
        losses = []
        for size in options.bucket_size:
            ratios = []
            for schedule in options.pipeline_schedule:
                times = {
                    other: found[Case(schedule, bandwidth, replicas, other)].seconds
                    for other in options.bucket_size
                }
                ratios.append(times[size] / min(times.values()) - 1)
            losses.append(f"{mean(ratios):.1%}")
        yield [str(replicas), *losses]


def _by_schedule(
    found: Results, bandwidth: float, replicas: int, options: ScaleFlags
) -> Iterator[list[str]]:
    for schedule in options.pipeline_schedule:
        cases = [Case(schedule, bandwidth, replicas, size) for size in options.bucket_size]
        yield [schedule, *(_cell(found[case]) for case in cases)]


def _cell(found: Found) -> str:
    return f"{found.seconds:.3f} ({found.reduced:.0%}, {found.gathered:.0%})"


def parse_arguments(argv: Sequence[str] | None) -> ScaleFlags:
    """Read the command line."""
    return read(argv, __doc__, ScaleFlags)[ScaleFlags]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(argv)
    for line in report(simulated(options), options):
        print(line)


if __name__ == "__main__":
    main()
