"""Describes a run before its first iteration, and makes the meter that times it."""

from typing import Final

from megatron.model.flops import iteration_flops
from megatron.planning.links_in_words import links_in_words
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_plan import described
from megatron.run.run_config import RunConfig
from megatron.simulator.compare import idle
from megatron.simulator.simulate import simulate
from megatron.training.metrics.log import Log
from megatron.training.metrics.log_line import introduction, vocabulary_words
from megatron.training.metrics.meter import Meter
from megatron.training.metrics.peak_tflops import peak_of_rank
from megatron.training.metrics.records import Started, now
from megatron.training.metrics.stragglers import Stragglers
from megatron.training.progress import Progress, total_iterations
from megatron.training.setup import TrainState

MOST_PASSES: Final = 20_000
"""Passes of the largest plan that is simulated for a record, which takes a rank about a second."""


def introduce(config: RunConfig, state: TrainState, start: Progress, log: Log) -> Meter:
    """Log the layout, the sizes and how FLOPs are counted; return the meter of the run."""
    groups, model, train_config = state.groups, config.model, config.train
    groups.world.barrier()  # all ranks measure the peak at the same time, as under load
    peak = peak_of_rank(groups.device, train_config.dtype, config.log.peak_tflops)
    counts, total = _parameters(config, state)
    flops = iteration_flops(model, 1) * train_config.global_batch_size
    words = vocabulary_words(model.vocab_size, config.data.added_entries)
    schedule = described(config.parallel.pipeline_schedule, state.run_plan)
    lines = introduction(
        config.parallel, train_config, words, schedule, counts, flops, peak, of_model=total
    )
    for line in (*config.notes, *lines):
        log.say(line)
    if train_config.eight_bits is not None:
        log.say(
            "--fp8-format: the MFU is still a share of the peak above, of 16 bits: attention and "
            "the output layer multiply in 16, so no one peak holds for all products"
        )
    if config.parallel.placement.machines > 1:
        log.say(links_in_words(config.parallel))
    started = Started(
        time=now(),
        iteration=start.iteration,
        consumed_samples=start.consumed_samples,
        train_iters=total_iterations(train_config, start),
        world_size=groups.world.size,
        parameters=total,
        flops=flops,
        peak_tflops=peak.tflops,
        config=config,
        planned_idle=planned_idle(state.run_plan) if log.wants_ranks else None,
    )
    log.write(started)
    wanted = groups.world.all_gather_object(log.wants_ranks)[0]  # rank 0 alone has sinks
    by_rank = wanted or config.guard.log_straggler
    return Meter(started, groups, log, Stragglers(state) if by_rank else None)


def planned_idle(run_plan: RunPlan) -> float | None:
    """Return the idle share that a plan has by the costs for which it was made.

    ``None``: the plan has more than ``MOST_PASSES`` passes.
    """
    if sum(map(len, run_plan.plan.rows)) > MOST_PASSES:
        return None
    return idle(simulate(run_plan.program, run_plan.costs))


def _parameters(config: RunConfig, state: TrainState) -> tuple[list[int], int]:
    """Return how many parameters each rank of this replica has, without copies, and the model.

    A replica need not have all experts, if experts are spread over ranks.
    """
    groups, sizes = state.groups, [0, 0]
    for own in state.parameters:
        if not own.is_copy:
            sizes[own.axis is not None] += own.parameter.numel()
    everywhere = groups.world.all_gather_object(sizes)
    of_replica = [everywhere[rank] for rank in groups.vocabulary.ranks]
    experts = sum(spread for _, spread in everywhere) // config.parallel.expert_copies
    return [sum(both) for both in of_replica], sum(usual for usual, _ in of_replica) + experts
