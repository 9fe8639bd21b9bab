"""Settings near those of a run that does not fit, and that would; the fastest first."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from megatron.config.recompute_flags import EVERY_LAYER
from megatron.config.run_config import ParallelConfig, RunConfig, TrainConfig
from megatron.layers.recompute import Recomputation
from megatron.schedules.search.watch import Watch
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.gpus import GPUS, Gpu
from megatron.simulator.units import MEMORY, percent
from megatron.training.planning.forecast_run import Fullest, RunForecast, forecast_run
from megatron.training.planning.least_memory import least_memory
from megatron.training.planning.run_plan import Candidate, asked, candidates

ALTERNATIVES: Final = 5
"""How many settings that fit are named if the settings of the command line do not fit."""

_LEAST_DELAYED: Final = min(
    (known for known in TREATMENTS.values() if known.is_sharded and not known.synchronous),
    key=lambda known: known.delay,
)
"""The treatment that is tried where another leaves too little memory."""


def what_would_fit(config: RunConfig, gpu: Gpu, own: Fullest, watch: Watch) -> str:
    """Return the fastest similar settings that fit, or the reason why none does.

    Args:
        config: the run.
        gpu: of every rank.
        own: what the run itself holds.
        watch: over the search for plans; only settings are planned that can fit at all.
    """
    near = list(_neighbours(config, watch))
    held = [own, *(setting.least for setting in near)]
    able = [setting for setting in near if setting.least.peak <= gpu.usable]
    able.sort(key=lambda setting: setting.candidate.least_time)
    watch.expect(len(able))
    fitting: list[tuple[str, RunForecast]] = []
    times: list[float] = []
    for setting in able:
        enough = sorted(times)[ALTERNATIVES - 1 : ALTERNATIVES]
        if watch.is_over or (enough and setting.candidate.least_time >= enough[0]):
            break  # by FLOPs no other is faster than those that are shown
        other = forecast_run(setting.config, setting.candidate.run_plan, gpu)
        samples = f"{other.samples_per_second:.3g} samples/s"
        watch.planned(setting.named, samples if other.fits else "does not fit")
        if other.fits:
            fitting.append((setting.named, other))
            times.append(setting.candidate.time)
    watch.close()
    fitting.sort(key=lambda pair: -pair[1].samples_per_second)
    if not fitting:
        return _nothing_fits(
            min(held, key=lambda each: each.peak), cut=bool(able) and watch.was_cut
        )
    lines = ["what would fit, the fastest first:"]
    for named, other in fitting[:ALTERNATIVES]:
        lines.append(
            f"  {named}: {MEMORY.write(max(other.outcome.peak))}, "
            f"{other.samples_per_second:.3g} samples/s, MFU {percent(other.outcome.mfu)}"
        )
    return "\n".join(lines)


def _nothing_fits(least: Fullest, *, cut: bool) -> str:
    """Return that no similar setting fits, and the way out.

    Args:
        least: the least that any of them takes.
        cut: whether the search for them was ended.
    """
    if cut:
        return "the time of --search-seconds was over before a setting was found that fits"
    larger = " or ".join(known.name for known in GPUS.values() if known.usable >= least.peak)
    return (
        f"nothing nearby fits either: the least is {MEMORY.write(least.peak)} on rank "
        f"{least.rank}, of which {MEMORY.write(least.static)} are there all the time: take "
        + (f"GPUs with that much memory ({larger}), " if larger else "")
        + "more ranks (--pipeline-model-parallel-size, --tensor-model-parallel-size), or a smaller "
        "model"
    )


def _candidates_if_any(config: RunConfig, watch: Watch) -> list[Candidate]:
    """Return the schedules that a run could take; none where its layers fit the stages of none."""
    try:
        return candidates(config, watch=watch)
    except ValueError:
        return []


class _Setting(NamedTuple):
    """A run like the one that was asked for.

    Attributes:
        named: the flags that make the difference.
        config: the run.
        candidate: its schedule, not planned yet.
        least: what any plan of it holds at least.
    """

    named: str
    config: RunConfig
    candidate: Candidate
    least: Fullest


def _trainings(train: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Yield trainings that hold less at a time, with the flags that make the difference.

    They are the one that is asked for, one with half microbatches, and one in which every layer is
    computed again.
    """
    yield "", train
    batch = train.micro_batch_size
    if batch % 2 == 0:
        yield f" --micro-batch-size {batch // 2}", replace(train, micro_batch_size=batch // 2)
    if not train.recomputation.group:
        yield " " + EVERY_LAYER, replace(train, recomputation=Recomputation(group=1))


def _neighbours(config: RunConfig, watch: Watch) -> Iterator[_Setting]:
    """Yield every schedule, with and without vocabulary parallelism, that may hold less."""
    within_b = "" if config.parallel.recompute_ahead is None else " without --recompute-ahead"
    treatments = dict.fromkeys((config.parallel.vocab_parallel, _LEAST_DELAYED.name))
    for difference, train in _trainings(config.train):
        for treatment in treatments:
            parallel = replace(
                config.parallel,
                vocab_parallel=treatment,
                memory_limit=None,
                recompute_ahead=None,
                schedule_file=None,
                measured_costs=None,
            )
            parallel = _split_evenly(parallel)
            other = replace(config, train=train, parallel=parallel)
            for candidate in _candidates_if_any(other, watch):
                named = f"--pipeline-schedule {candidate.schedule} --vocab-parallel {treatment}"
                least = least_memory(other, candidate)
                yield _Setting(named + difference + within_b, other, candidate, least)
    yield from _with_recomputed_logits(config, watch)


def _with_recomputed_logits(config: RunConfig, watch: Watch) -> Iterator[_Setting]:
    """Yield the run itself without logits in memory between its passes."""
    if config.train.vocab_recompute:
        return
    other = replace(config, train=replace(config.train, vocab_recompute=True))
    for candidate in asked(other, watch=watch):
        named = f"--pipeline-schedule {candidate.schedule} --vocab-recompute"
        yield _Setting(named, other, candidate, least_memory(other, candidate))


def _split_evenly(parallel: ParallelConfig) -> ParallelConfig:
    """Return a layout whose vocabulary is padded so that it splits into its shards."""
    shards = parallel.vocab_shards
    return replace(parallel, padded_vocab_size=-(-parallel.padded_vocab_size // shards) * shards)
