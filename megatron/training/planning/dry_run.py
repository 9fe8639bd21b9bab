"""``--dry-run``: reports the plan of a run, and its time and memory on a named GPU.

No rank is started and no GPU is needed. Training would take the same plan; its times and bytes come
from the cost model of ``megatron/simulator/costs`` with the GPU's data sheet.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from megatron.config.precision_rules import NEEDS_16_BITS
from megatron.config.run_config import ParallelConfig, RunConfig
from megatron.schedules.catalogue import TRAITS
from megatron.schedules.counted import counted
from megatron.schedules.held import in_flight
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.accuracy import (
    ALLOCATED_WITHIN,
    CHECKED,
    together,
)
from megatron.simulator.costs.gpus import GIB, Gpu
from megatron.simulator.costs.training_bytes import of_ranks
from megatron.simulator.draw.text import draw_text
from megatron.simulator.units import MEMORY, TIME, percent
from megatron.training.planning.forecast_run import Fullest, RunForecast, forecast_run
from megatron.training.planning.least_memory import least_memory
from megatron.training.planning.links_in_words import links_in_words
from megatron.training.planning.replica_report import replica_lines
from megatron.training.planning.run_plan import NEAR, Candidate, asked, ranking
from megatron.training.planning.what_would_fit import what_would_fit

STRIPS: Final = 2
"""Strips of the timeline's drawing that are shown; the rest is left out."""

_EIGHT_BITS: Final = (
    "--fp8-format: bytes are those of 8 bits, times those of 16: no products in 8 bits have been "
    "measured, so none are assumed to be faster"
)


def dry_run(config: RunConfig, gpu: Gpu, watch: Watch | None = None) -> Iterator[str]:
    """Yield the paragraphs of the report on a run that is not started.

    Args:
        config: the run.
        gpu: the GPU of every rank.
        watch: shows how far the search for the plan is, and ends it when its time is up. The search
            for other settings that would fit has a time of its own, that of the configuration.

    Raises:
        ValueError: no plan can be made, or the run is in fp32, for which no costs are counted.
    """
    if config.train.dtype == torch.float32:
        raise ValueError(NEEDS_16_BITS)
    traits = TRAITS[config.parallel.pipeline_schedule]
    watch = Watch() if watch is None else watch
    compared = asked(config, watch=watch)
    if "file" not in traits.options:
        least = min((least_memory(config, one) for one in compared), key=lambda each: each.peak)
        if least.peak > gpu.usable:
            yield f"{_job(config, gpu)}\n{_never_fits(config, least, gpu)}"
            yield what_would_fit(config, gpu, least, watch.again(config.parallel.advice_seconds))
            return
    ranked = ranking(compared) if traits.compares else []
    run_plan = (ranked or compared)[0].run_plan
    watch.close()
    found = forecast_run(config, run_plan, gpu)
    yield _head(found)
    yield draw_text(found.timeline, unit="s", most=STRIPS)
    yield _figures(found)
    if config.parallel.interconnect is not None:
        yield links_in_words(config.parallel)
    if found.exchanges is not None:
        yield "\n".join(replica_lines(found, found.exchanges))
    if ranked:
        yield _ranking(config, ranked, gpu)
    if not found.fits:
        yield what_would_fit(
            config, gpu, found.fullest, watch.again(config.parallel.advice_seconds)
        )


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
    of_replica = parallel.grid.world_size // replicas
    alone = "; --dry-run-replicas N plans more" if replicas == 1 else ""
    share = "" if replicas == 1 else " for each replica"
    again = " with recomputed logits" if train.vocab_recompute else ""
    microbatches = counted(train.num_microbatches, "microbatch")
    narrow = "" if train.eight_bits is None else f"{_EIGHT_BITS}\n"
    return (
        f"dry run, nothing is started: {counted(replicas, 'replica')} of "
        f"{of_replica} x {gpu.name} ({gpu.peak_tflops:g} TFLOP/s, "
        f"{gpu.memory / GIB:.0f} GiB){alone}\n"
        f"{_shared(parallel)}{narrow}"
        f"vocabulary {parallel.vocab_parallel}{again}; global batch "
        f"{train.global_batch_size}: {microbatches} of "
        f"{counted(train.micro_batch_size, 'sample')}{share}"
    )


def _shared(parallel: ParallelConfig) -> str:
    """Return a line on the ranks that share layers or sequences, if there are: all are alike."""
    tensor, context = parallel.tensor_size, parallel.context_size
    if tensor * context == 1:
        return ""
    sequence = " and the sequence" if parallel.sequence_parallel else ""
    layers = f" x {tensor} tensor-parallel ranks that share the layers{sequence}"
    tokens = f" x {context} context-parallel ranks that share every sequence"
    return (
        f"pipeline of {parallel.pipeline_size}{layers if tensor > 1 else ''}"
        f"{tokens if context > 1 else ''}; a rank below is any of those {tensor * context}\n"
    )


def _figures(found: RunForecast) -> str:
    outcome = found.outcome
    lines = [
        f"iteration {TIME.write(outcome.seconds)}: schedule {TIME.write(outcome.schedule)}, of "
        f"which ranks idle {outcome.idle:.1%}; optimizer's step {TIME.write(outcome.step)}; "
        f"MFU {percent(outcome.mfu)}",
        "rates: the shares of the data sheet that Megatron-LM's kernels attain on A100s under "
        f"{found.config.parallel.vocab_parallel}",
        _checked(found),
        *_recomputed(found),
    ]
    static = of_ranks(found.sizes.static)
    for rank, (peak, held) in enumerate(zip(outcome.peak, static, strict=True)):
        verdict = "" if peak <= found.gpu.usable else "  does not fit"
        lines.append(
            f"rank {rank}: peak {MEMORY.write(peak)} (parameters, optimizer and transfers "
            f"{MEMORY.write(held)}){verdict}"
        )
    return "\n".join(lines)


def _recomputed(found: RunForecast) -> Iterator[str]:
    """Yield a line on what the GPUs compute more than once, if they do."""
    again, ahead = found.repeated_flops, found.config.parallel.recompute_ahead
    where = "" if ahead is None else f" (in passes R, up to {counted(ahead, 'chunk')} ahead of B)"
    if again:
        yield (
            f"recomputation{where}: the GPUs do {again / found.model_flops:.1%} more FLOPs than "
            "the model's, which alone count for the MFU"
        )


def _checked(found: RunForecast) -> str:
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
        f"auto compares by FLOPs, {_transfers(config.parallel)}, and takes the first: no other "
        f"that fits is more than {NEAR:.0%} faster. Time, MFU, idle time and memory are those of "
        f"{gpu.name}",
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


def _transfers(parallel: ParallelConfig) -> str:
    """Return what transfers count for where plans are made by FLOPs."""
    if parallel.interconnect is None:
        return "communication being free, whatever the GPU"
    return "and transfers by their time"


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
        f"{least.rank} ({MEMORY.write(least.static)} of parameters, optimizer and transfers, the "
        f"rest for one microbatch), and tensors can use {MEMORY.write(gpu.usable)} of {gpu.name}; "
        "so no plan was searched"
    )
