"""``--dry-run``: reports the plan of a run, and its time and memory on a named GPU.

No rank is started and no GPU is needed. Training would take the same plan. The times and bytes of
the report come from the cost model of ``megatron/simulator/costs`` with the GPU's data sheet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from megatron.planning.checked_runs import checked
from megatron.planning.compared import compared_lines, completed, not_looked_at
from megatron.planning.count.run import count_ranks
from megatron.planning.forecast_run import RunForecast
from megatron.planning.job_in_words import head, job
from megatron.planning.launch_pace import launch_pace
from megatron.planning.links_in_words import links_in_words
from megatron.planning.memory_limit import limit_in_words
from megatron.planning.replica_report import replica_lines
from megatron.planning.run_memory import Fullest
from megatron.planning.run_plan import all_compared, compares
from megatron.planning.what_would_fit import what_would_fit
from megatron.run.precision import NARROW_SUMS, NEEDS_16_BITS
from megatron.run.run_config import RunConfig
from megatron.schedules.catalogue import TRAITS
from megatron.schedules.counted import counted
from megatron.schedules.plan import plan_of_one
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.draw.text import draw_text
from megatron.simulator.units import MEMORY, TIME, percent

STRIPS: Final = 2
"""Strips of the timeline's drawing that are shown; the rest is left out."""


def dry_run(
    config: RunConfig, gpu: Gpu, watch: Watch | None = None, seconds: float | None = None
) -> Iterator[str]:
    """Yield the paragraphs of the report on a run that is not started.

    Args:
        config: the run.
        gpu: the GPU of every rank.
        watch: shows how far the search for the plan is, and ends the search when its time is up.
            The search for other settings that would fit has another limit, in ``config``.
        seconds: of work to compare schedules, if ``watch`` has no limit.

    Raises:
        ValueError: no plan can be made, the plan exceeds the limit by memory, or the
            run is in fp32, for which no costs are counted.
    """
    if config.train.dtype == torch.float32:
        raise ValueError(NEEDS_16_BITS)
    watch = Watch() if watch is None else watch
    config = config.on(gpu)
    compared = all_compared(config, watch=watch, seconds=seconds)
    if "file" not in TRAITS[config.parallel.pipeline_schedule].options:
        held = [(each.least_memory, each.config) for each in compared.candidates]
        least, own = min(held, key=lambda pair: pair[0].peak)
        if not least.fits(gpu):
            yield f"{job(own, gpu)}\n{_never_fits(config, least, gpu, compared.untried)}"
            yield what_would_fit(own, gpu, least, _for_advice(config, watch))
            return
    table, first = None, compared.candidates[0]
    if compares(config):
        taken = compared.choose(seconds)
        own_watch = _for_advice(config, watch)
        table = completed(taken, compared.candidates, own_watch, every=True)
        own_watch.close("the schedules that were planned are shown")
        first = table.taken
    first.check_memory_limit()
    watch.close()
    yield head(config, first, gpu)
    if (limit := limit_in_words(first.config, first.run_plan)) is not None:
        yield limit
    found = first.forecast
    assert found is not None, "a dry run asks about a GPU"
    yield draw_text(found.timeline, unit="s", most=STRIPS)
    yield _figures(found)
    if config.parallel.gpu is not None:
        yield links_in_words(config.parallel)
    if found.exchanges is not None:
        yield "\n".join(replica_lines(found, found.exchanges))
    if table is not None:
        limit = _for_advice(config, watch).limit
        yield compared_lines(table, gpu, limit, compared.untried, compared.left_out)
    if not found.fullest.fits(gpu):
        yield what_would_fit(first.config, gpu, found.fullest, _for_advice(config, watch))


def _for_advice(config: RunConfig, watch: Watch) -> Watch:
    """Return the watch over a dry run's advice, with the limit of work for advice."""
    return watch.counting(config.parallel.planning.advice_seconds)


def _figures(found: RunForecast) -> str:
    outcome = found.outcome
    once = f"weights in 8 bits {TIME.write(outcome.once)}; " if outcome.once else ""
    lines = [
        f"iteration {TIME.write(outcome.seconds)}: schedule {TIME.write(outcome.schedule)}, of "
        f"which ranks idle {outcome.idle:.1%}; {once}optimizer's step {TIME.write(outcome.step)}; "
        f"MFU {percent(outcome.mfu)}",
        "seconds: of all that the code launches and sends, at the shares of the data sheet that "
        "published runs attain (docs/predictions.md)",
        checked(found),
        *_pace(found),
        *_recomputed(found),
        *_on_host(found),
    ]
    for rank, (peak, memory) in enumerate(zip(outcome.peak, found.memories, strict=True)):
        own = Fullest(rank, peak, memory.always, memory.outside)
        verdict = "" if own.fits(found.gpu) else "  does not fit"
        lines.append(
            f"rank {rank}: peak {MEMORY.write(peak)} (parameters, gradients and optimizer "
            f"{MEMORY.write(memory.always)}){verdict}"
        )
    return "\n".join([*lines, *_communicators(found), *_messages(found), _verdict(found)])


def _communicators(found: RunForecast) -> Iterator[str]:
    """Yield a line on the memory of NCCL's communicators, if ranks communicate."""
    most = max(found.memories, key=lambda memory: memory.outside)
    if most.communicators:
        yield (
            f"NCCL: up to {counted(most.communicators, 'communicator')} a rank, which take "
            f"{MEMORY.write(most.outside)} by estimate (measured over sockets only), beside peaks"
        )


def _messages(found: RunForecast) -> Iterator[str]:
    """Yield a line on the memory of messages that PyTorch keeps, if ranks send messages."""
    most = max(found.kept_messages, default=0.0)
    if most:
        yield (
            f"messages: PyTorch may keep up to {MEMORY.write(most)} on rank "
            f"{found.kept_messages.index(most)} while the host is ahead of the GPU, beside peaks; "
            "it waits for this memory before it runs out"
        )


def _verdict(found: RunForecast) -> str:
    """Return whether the plan fits, by the rank that holds the most."""
    fullest, gpu = found.fullest, found.gpu
    holds = f"rank {fullest.rank} holds the most, {MEMORY.write(fullest.peak)}"
    room = MEMORY.write(fullest.room(gpu))
    if found.fits:
        return f"the plan fits: {holds} of the {room} of {gpu.name} that tensors can use"
    if fullest.fits(gpu):
        return f"the plan is too large for its hosts: {found.host.in_words}; {_room_of_host(found)}"
    return f"the plan is too large: {holds}, and {fullest.room_in_words(gpu)}"


def _pace(found: RunForecast) -> Iterator[str]:
    """Yield a line on the host if it may be too slow for the GPU, or if it launches graphs."""
    train, plan = found.config.train, found.run_plan.plan
    pace = launch_pace(found.timeline, found.counts, plan.microbatches)
    if train.captures_passes:
        yield pace.of_graphs_in_words()
        return
    replayed = None
    if pace.is_short and train.could_capture:
        captured = replace(found.config, train=replace(train, captures_passes=True))
        counts = count_ranks(captured, plan_of_one(plan), found.run_plan.layers)
        replayed = launch_pace(found.timeline, counts, plan.microbatches)
    words = pace.in_words(replayed)
    if words is not None:
        yield words


def _recomputed(found: RunForecast) -> Iterator[str]:
    """Yield a line on the FLOPs that GPUs do more than once, if there are any."""
    again, ahead = found.repeated_flops, found.config.parallel.recompute_ahead
    where = "" if ahead is None else f" (in passes R, up to {counted(ahead, 'chunk')} ahead of B)"
    if again:
        yield (
            f"recomputation{where}: the GPUs do {again / found.model_flops:.1%} more FLOPs than "
            "the model's, which alone count for the MFU"
        )


def _on_host(found: RunForecast) -> Iterator[str]:
    """Yield a line each on activations and on states of the optimizer that are on the host."""
    activations = max(found.activations_on_host)
    if activations:
        yield (
            f"activations on the host: up to {MEMORY.write(activations)} a rank, in buffers of "
            "powers of two of bytes, as PyTorch pins memory"
        )
    states, most = found.config.train.host_states, max(own.on_host for own in found.memories)
    if states is not None:
        beside = "beside" if states.overlap_cpu_optimizer_d2h_h2d else "before and after"
        yield (
            f"states on the host: up to {MEMORY.write(most)} a rank; the step has its copies "
            f"{beside} the CPU's updates; no GPU has measured the bandwidths that are assumed"
        )
    if activations or states is not None:
        yield f"hosts: {found.host.in_words}; {_room_of_host(found)}"


def _room_of_host(found: RunForecast) -> str:
    """Return whether the memory of a machine has room for the bytes on the host."""
    memory = found.config.parallel.offload.memory
    if memory is None:
        return "the run is refused on a machine with less memory (--host-memory N compares here)"
    has = f"a machine has {MEMORY.write(memory)} (--host-memory)"
    return has if found.fits_hosts else f"{has}, too little: {found.host.way_out}"


def _never_fits(config: RunConfig, least: Fullest, gpu: Gpu, untried: Sequence[str]) -> str:
    """Return lines that say that no plan of the run fits a GPU, with the least memory of any.

    ``untried`` are the words of alternatives that were not bounded, for lack of time.
    """
    schedule = config.parallel.pipeline_schedule
    plans = "of any schedule" if TRAITS[schedule].compares else f"of {schedule}"
    if config.alternatives:
        plans += f" under {'the alternatives' if untried else 'any alternative'} of auto"
        plans += " that were looked at" * bool(untried)
    rest = "".join(f"\n{line}" for line in not_looked_at(untried))
    found = "it does not fit" if untried else "it can never fit"
    return (
        f"{found}: no plan {plans} holds less than {MEMORY.write(least.peak)} on rank "
        f"{least.rank} ({MEMORY.write(least.static)} of parameters, optimizer and transfers, the "
        f"rest for one microbatch), and {least.room_in_words(gpu)}; "
        f"so no plan was searched{_narrower_sums(config)}{rest}"
    )


def _narrower_sums(config: RunConfig) -> str:
    """Return a line on the flags that halve the memory of gradients; empty: they do not apply."""
    train = config.train
    wide = train.gradient_dtype == torch.float32 and not train.skip_train
    if not wide or config.optimizer.optimizer != "adam":
        return ""
    return f"\ngradients add up in fp32; {NARROW_SUMS} takes half of their memory"
