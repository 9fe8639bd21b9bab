"""``--dry-run``: reports the plan of a run, and its time and memory on a named GPU.

No rank is started and no GPU is needed. Training would take the same plan; its times and bytes come
from the cost model of ``megatron/simulator/costs`` with the GPU's data sheet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from megatron.config.recompute_flags import EVERY_LAYER
from megatron.config.run_config import ParallelConfig, RunConfig, TrainConfig
from megatron.layers.recompute import Recomputation
from megatron.schedules.catalogue import TRAITS
from megatron.schedules.counted import counted
from megatron.schedules.held import in_flight
from megatron.schedules.search.watch import Watch
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.accuracy import ALLOCATED_WITHIN, CHECKED, together
from megatron.simulator.costs.gpus import GIB, GPUS, Gpu
from megatron.simulator.costs.training_bytes import of_ranks
from megatron.simulator.draw.text import draw_text
from megatron.simulator.units import MEMORY, TIME, percent
from megatron.training.planning.forecast_run import Fullest, RunForecast, forecast_run
from megatron.training.planning.least_memory import least_memory
from megatron.training.planning.replica_report import replica_lines
from megatron.training.planning.run_plan import (
    NEAR,
    Candidate,
    asked,
    candidates,
    ranking,
)

STRIPS: Final = 2
"""Strips of the timeline's drawing that are shown; the rest is left out."""

ALTERNATIVES: Final = 5
"""How many settings that fit are named if the settings of the command line do not fit."""

_LEAST_DELAYED: Final = min(
    (known for known in TREATMENTS.values() if known.is_sharded and not known.synchronous),
    key=lambda known: known.delay,
)
"""The treatment that is tried where another leaves too little memory."""


def dry_run(config: RunConfig, gpu: Gpu, watch: Watch | None = None) -> Iterator[str]:
    """Yield the paragraphs of the report on a run that is not started.

    Args:
        config: the run.
        gpu: the GPU of every rank.
        watch: shows how far the search for the plan is, and ends it when its time is up. The search
            for other settings that would fit has as much time.

    Raises:
        ValueError: no plan can be made, or the run is in fp32, for which no costs are counted.
    """
    if config.train.dtype == torch.float32:
        raise ValueError("--dry-run counts FLOPs and bytes of 16-bit numbers: add --bf16 or --fp16")
    traits = TRAITS[config.parallel.pipeline_schedule]
    watch = Watch() if watch is None else watch
    compared = asked(config, watch=watch)
    if "file" not in traits.options:
        least = min((least_memory(config, one) for one in compared), key=lambda each: each.peak)
        if least.peak > gpu.usable:
            yield f"{_job(config, gpu)}\n{_never_fits(config, least, gpu)}"
            yield _what_would_fit(config, gpu, least, watch.again())
            return
    ranked = ranking(compared) if traits.compares else []
    run_plan = (ranked or compared)[0].run_plan
    watch.close()
    found = forecast_run(config, run_plan, gpu)
    yield _head(found)
    yield draw_text(found.timeline, unit="s", most=STRIPS)
    yield _figures(found)
    if found.exchanges is not None:
        yield "\n".join(replica_lines(found, found.exchanges))
    if ranked:
        yield _ranking(config, ranked, gpu)
    if not found.fits:
        yield _what_would_fit(config, gpu, found.fullest, watch.again())


def _head(found: RunForecast) -> str:
    config, plan, gpu = found.config, found.run_plan.plan, found.gpu
    layers = " ".join(
        f"{rank}.{chunk}:{count}"
        for (rank, chunk), count in zip(plan.stages, found.run_plan.layers, strict=True)
    )
    depths = config.model.mtp_num_layers
    further = f", and behind them {counted(depths, 'layer')} of further tokens" if depths else ""
    held = counted(max(in_flight(plan)), "microbatch in flight")
    seconds = TIME.write(found.outcome.seconds)
    taken = f" takes {found.run_plan.schedule}: {held}, {seconds} an iteration"
    schedule = config.parallel.pipeline_schedule
    return (
        f"{_job(config, gpu)}\n"
        f"schedule {schedule}{taken if TRAITS[schedule].compares else ''}\n"
        f"layers by stage (rank.chunk:layers): {layers}{further}"
    )


def _job(config: RunConfig, gpu: Gpu) -> str:
    """Return what the job is, but for its plan: its GPUs, replicas, vocabulary and batch."""
    train, replicas, parallel = config.train, config.train.replicas, config.parallel
    tensor = parallel.tensor_size
    alone = "; --dry-run-replicas N plans more" if replicas == 1 else ""
    share = "" if replicas == 1 else " for each replica"
    again = " with recomputed logits" if train.vocab_recompute else ""
    microbatches = counted(train.num_microbatches, "microbatch")
    return (
        f"dry run, nothing is started: {counted(replicas, 'replica')} of "
        f"{tensor * parallel.pipeline_size} x {gpu.name} ({gpu.peak_tflops:g} TFLOP/s, "
        f"{gpu.memory / GIB:.0f} GiB){alone}\n"
        f"{_shared(parallel) if tensor > 1 else ''}"
        f"vocabulary {parallel.vocab_parallel}{again}; global batch "
        f"{train.global_batch_size}: {microbatches} of "
        f"{counted(train.micro_batch_size, 'sample')}{share}"
    )


def _shared(parallel: ParallelConfig) -> str:
    """Return a line on the tensor-parallel ranks, which are all alike."""
    sequence = " and the sequence" if parallel.sequence_parallel else ""
    return (
        f"pipeline of {parallel.pipeline_size} x {parallel.tensor_size} tensor-parallel ranks that "
        f"share the layers{sequence}; a rank below is any of those {parallel.tensor_size}\n"
    )


def _figures(found: RunForecast) -> str:
    outcome = found.outcome
    lines = [
        f"iteration {TIME.write(outcome.seconds)}: schedule {TIME.write(outcome.schedule)}, of "
        f"which ranks idle {outcome.idle:.1%}; optimizer's step {TIME.write(outcome.step)}; "
        f"MFU {percent(outcome.mfu)}",
        "rates: the shares of the data sheet that Megatron-LM's kernels attain on A100s under "
        f"{found.config.parallel.vocab_parallel}",
        _checked(),
        *_recomputed(found),
    ]
    static = of_ranks(found.sizes.static)
    for rank, (peak, held) in enumerate(zip(outcome.peak, static, strict=True)):
        verdict = "" if peak <= found.gpu.usable else "  does not fit"
        lines.append(
            f"rank {rank}: peak {MEMORY.write(peak)} (parameters, optimizer and workspace "
            f"{MEMORY.write(held)}){verdict}"
        )
    return "\n".join(lines)


def _recomputed(found: RunForecast) -> Iterator[str]:
    """Yield a line on what the GPUs compute more than once, if they do."""
    again = found.repeated_flops
    if again:
        yield (
            f"recomputation: the GPUs do {again / found.model_flops:.1%} more FLOPs than the "
            "model's, which alone count for the MFU"
        )


def _checked() -> str:
    """Return how far predictions were off where there was something to compare them with."""
    tables = {schedule: together(by_gpus.values()) for schedule, by_gpus in CHECKED.items()}
    off = ", ".join(
        f"{own.mfu:.1f} points ({own.most_mfu:.1f} at most) in {own.runs} runs of {schedule}"
        for schedule, own in tables.items()
    )
    return (
        f"checked: with Megatron-LM on A100s, where the MFU was off by {off}; with what this "
        f"project allocates, where memory was off by {ALLOCATED_WITHIN:.1%} at most"
    )


def _ranking(config: RunConfig, ranked: Sequence[Candidate], gpu: Gpu) -> str:
    """Return the table of what ``auto`` compares, in its order, and what a GPU makes of each."""
    compared = [(each, forecast_run(config, each.run_plan, gpu)) for each in ranked]
    time = TIME.unit(*(found.outcome.seconds for _, found in compared))
    memory = MEMORY.unit(*(max(found.outcome.peak) for _, found in compared))
    lines = [
        "auto compares by FLOPs, communication being free, whatever the GPU, and takes the first: "
        f"no other that fits is more than {NEAR:.0%} faster. Time, MFU, idle time and memory are "
        f"those of {gpu.name}",
        f"{'schedule':<12} {'by FLOPs':>8} {time.name:>8} {'MFU':>6} {'idle':>7} {memory.name:>6} "
        f"{'in flight':>9}",
    ]
    for candidate, found in compared:
        outcome = found.outcome
        note = "" if candidate.fits else "  exceeds --zero-bubble-max-pending-backward"
        note += "" if found.fits else "  does not fit"
        lines.append(
            f"{candidate.schedule:<12} {candidate.time / ranked[0].time:>8.3f} "
            f"{TIME.number(outcome.seconds, time):>8} {percent(outcome.mfu):>6} "
            f"{outcome.idle:>7.1%} {MEMORY.number(max(outcome.peak), memory):>6} "
            f"{candidate.in_flight:>9.1f}{note}"
        )
    lines += _faster(compared, gpu)
    return "\n".join(lines)


def _faster(compared: Sequence[tuple[Candidate, RunForecast]], gpu: Gpu) -> Iterator[str]:
    """Yield a line if a GPU is faster with another schedule that fits than with the first."""
    seconds = compared[0][1].outcome.seconds
    fitting = [pair for pair in compared if pair[0].fits and pair[1].fits]
    best, found = min(fitting, key=lambda pair: pair[1].outcome.seconds, default=compared[0])
    if found.outcome.seconds < seconds:
        yield (
            f"{gpu.name} would be faster with --pipeline-schedule {best.schedule}: "
            f"{TIME.write(found.outcome.seconds)} instead of {TIME.write(seconds)}"
        )


def _never_fits(config: RunConfig, least: Fullest, gpu: Gpu) -> str:
    """Return that no plan of the run fits a GPU, and how much memory would do."""
    schedule = config.parallel.pipeline_schedule
    plans = "of any schedule" if TRAITS[schedule].compares else f"of {schedule}"
    return (
        f"it can never fit: no plan {plans} holds less than {MEMORY.write(least.peak)} on rank "
        f"{least.rank} ({MEMORY.write(least.static)} of parameters, optimizer and workspace, the "
        f"rest for one microbatch), and tensors can use {MEMORY.write(gpu.usable)} of {gpu.name}; "
        "so no plan was searched"
    )


def _what_would_fit(config: RunConfig, gpu: Gpu, own: Fullest, watch: Watch) -> str:
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
    treatments = dict.fromkeys((config.parallel.vocab_parallel, _LEAST_DELAYED.name))
    for difference, train in _trainings(config.train):
        for treatment in treatments:
            parallel = replace(
                config.parallel,
                vocab_parallel=treatment,
                memory_limit=None,
                schedule_file=None,
                measured_costs=None,
            )
            parallel = _split_evenly(parallel)
            other = replace(config, train=train, parallel=parallel)
            for candidate in _candidates_if_any(other, watch):
                named = f"--pipeline-schedule {candidate.schedule} --vocab-parallel {treatment}"
                least = least_memory(other, candidate)
                yield _Setting(named + difference, other, candidate, least)
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
