"""``--dry-run``: reports the plan of a run, and its time and memory on a named GPU.

No rank is started and no GPU is needed. Training would take the same plan; its times and bytes come
from the cost model of ``megatron/simulator/costs`` with the GPU's data sheet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from megatron.config.run_config import RunConfig
from megatron.schedules.catalogue import TRAITS
from megatron.schedules.search.watch import Watch
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.accuracy import ALLOCATED_WITHIN, CHECKED, together
from megatron.simulator.costs.gpus import GIB, Gpu
from megatron.simulator.costs.training_bytes import of_ranks
from megatron.simulator.draw.text import draw_text
from megatron.training.planning.forecast_run import RunForecast, forecast_run
from megatron.training.planning.replica_report import replica_lines
from megatron.training.planning.run_plan import (
    NEAR,
    Candidate,
    candidates,
    make_run_plan,
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
        ValueError: no plan can be made, or the run is not in bf16, for which the costs are counted.
    """
    if config.train.dtype != torch.bfloat16:
        raise ValueError("--dry-run counts FLOPs and bytes of bf16: add --bf16")
    auto = TRAITS[config.parallel.pipeline_schedule].compares
    watch = Watch() if watch is None else watch
    ranked = ranking(candidates(config, watch=watch)) if auto else []
    run_plan = ranked[0].run_plan if auto else make_run_plan(config, watch=watch)
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
        yield _what_would_fit(found, watch.again())


def _head(found: RunForecast) -> str:
    config, plan, gpu = found.config, found.run_plan.plan, found.gpu
    layers = " ".join(
        f"{rank}.{chunk}:{count}"
        for (rank, chunk), count in zip(plan.stages, found.run_plan.layers, strict=True)
    )
    replicas = config.parallel.replicas.size
    pipelines = "" if replicas == 1 else f"{replicas} replicas of "
    return (
        f"dry run, nothing is started: {pipelines}{plan.ranks} x {gpu.name} "
        f"({gpu.peak_tflops:g} TFLOP/s, {gpu.memory / GIB:.0f} GiB)\n"
        f"schedule {config.parallel.pipeline_schedule}, vocabulary "
        f"{config.parallel.vocab_parallel}, {plan.microbatches} microbatches of "
        f"{config.train.micro_batch_size}\n"
        f"layers by stage (rank.chunk:layers): {layers}"
    )


def _figures(found: RunForecast) -> str:
    outcome = found.outcome
    lines = [
        f"iteration {outcome.seconds:.3f} s: schedule {outcome.schedule:.3f}, of which ranks idle "
        f"{outcome.idle:.1%}; optimizer's step {outcome.step:.3f}; "
        f"MFU {outcome.mfu:.1%}",
        "rates: the shares of the data sheet that Megatron-LM's kernels attain on A100s under "
        f"{found.config.parallel.vocab_parallel}",
        _checked(),
    ]
    static = of_ranks(found.sizes.static)
    for rank, (peak, held) in enumerate(zip(outcome.peak, static, strict=True)):
        verdict = "" if peak <= found.gpu.usable else "  does not fit"
        lines.append(
            f"rank {rank}: peak {peak / GIB:.1f} GiB (parameters, optimizer and workspace "
            f"{held / GIB:.1f}){verdict}"
        )
    return "\n".join(lines)


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
    lines = [
        "auto compares by FLOPs, communication being free, whatever the GPU, and takes the first: "
        f"no other that fits is more than {NEAR:.0%} faster. Seconds, MFU, idle time and GiB are "
        f"those of {gpu.name}",
        f"{'schedule':<12} {'by FLOPs':>8} {'seconds':>8} {'MFU':>6} {'idle':>7} {'GiB':>6} "
        f"{'in flight':>9}",
    ]
    compared = [(each, forecast_run(config, each.run_plan, gpu)) for each in ranked]
    for candidate, found in compared:
        outcome = found.outcome
        note = "" if candidate.fits else "  exceeds --zero-bubble-max-pending-backward"
        note += "" if found.fits else "  does not fit"
        lines.append(
            f"{candidate.schedule:<12} {candidate.time / ranked[0].time:>8.3f} "
            f"{outcome.seconds:>8.3f} {outcome.mfu:>6.1%} {outcome.idle:>7.1%} "
            f"{max(outcome.peak) / GIB:>6.1f} {candidate.in_flight:>9.1f}{note}"
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
            f"{found.outcome.seconds:.3f} s instead of {seconds:.3f}"
        )


def _what_would_fit(found: RunForecast, watch: Watch) -> str:
    """Return the fastest similar settings that fit, or the reason why none does."""
    fitting = []
    for named, other in _neighbours(found, watch):
        samples = f"{other.samples_per_second:.2f} samples/s"
        watch.note(f"  {named}: {samples if other.fits else 'does not fit'}")
        if other.fits:
            fitting.append((named, other))
    watch.close()
    fitting.sort(key=lambda pair: -pair[1].samples_per_second)
    if not fitting and watch.was_cut:
        return "the time of --search-seconds was over before a setting was found that fits"
    if not fitting:
        rank, peak, static = found.fullest
        return (
            f"nothing nearby fits either: of the {peak / GIB:.1f} GiB of rank {rank}, "
            f"{static / GIB:.1f} are there all the time: more ranks "
            "(--pipeline-model-parallel-size), or a smaller model"
        )
    lines = ["what would fit, the fastest first:"]
    for named, other in fitting[:ALTERNATIVES]:
        lines.append(
            f"  {named}: {max(other.outcome.peak) / GIB:.1f} GiB, "
            f"{other.samples_per_second:.2f} samples/s, MFU {other.outcome.mfu:.1%}"
        )
    return "\n".join(lines)


def _candidates_if_any(config: RunConfig, watch: Watch) -> list[Candidate]:
    """Return the schedules that a run could take; none where its layers fit the stages of none."""
    try:
        return candidates(config, watch=watch)
    except ValueError:
        return []


def _neighbours(found: RunForecast, watch: Watch) -> Iterator[tuple[str, RunForecast]]:
    """Yield every schedule, with and without vocabulary parallelism, and with half microbatches.

    When the time is up no more are planned.
    """
    config = found.config
    treatments = dict.fromkeys((config.parallel.vocab_parallel, _LEAST_DELAYED.name))
    batch = config.train.micro_batch_size
    for micro_batch_size in (batch, batch // 2) if batch % 2 == 0 else (batch,):
        train = replace(config.train, micro_batch_size=micro_batch_size)
        for treatment in treatments:
            parallel = replace(
                config.parallel,
                vocab_parallel=treatment,
                memory_limit=None,
                schedule_file=None,
                measured_costs=None,
            )
            other = replace(config, train=train, parallel=parallel)
            for candidate in _candidates_if_any(other, watch):
                if watch.is_over:
                    return
                named = f"--pipeline-schedule {candidate.schedule} --vocab-parallel {treatment}"
                if micro_batch_size != batch:
                    named += f" --micro-batch-size {micro_batch_size}"
                yield named, forecast_run(other, candidate.run_plan, found.gpu)
