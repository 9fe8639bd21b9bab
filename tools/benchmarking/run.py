"""Run one benchmark case of this framework and measure it."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from megatron.data.microbatch import Microbatch
from megatron.optimizer.grad_norm import local_sum_of_squares
from megatron.optimizer.lr_schedule import Rates
from megatron.planning.run_memory import held_by_ranks
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import DeviceMicrobatch, to_device
from megatron.runtime.communicator import links_of
from megatron.runtime.embedding_copies import ranks_with_copies
from megatron.runtime.timeline import Recorder
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.simulator.costs.from_timelines import costs_from_timelines
from megatron.simulator.simulate import Timeline, simulate
from megatron.training.agreement import check_agreement, run_digests
from megatron.training.connect import connect, leave
from megatron.training.layer_figures import summed_loads
from megatron.training.metrics.peak_memory import peak_memory
from megatron.training.rendezvous import join
from megatron.training.setup import TrainState, build_train_state
from tools.benchmarking.case import BenchmarkCase
from tools.benchmarking.harness import timed
from tools.benchmarking.measure import (
    WARM_UP_ITERATIONS,
    WARM_UP_MICROBATCHES,
    document,
    matrix_rates,
)

_RATES: Final = Rates(1e-4, 1e-4, 0.01)


def run_rank(case: BenchmarkCase, result: Path) -> None:
    """Run ``case`` on this rank of a torchrun job; rank 0 writes the measurements to ``result``.

    Short iterations warm up, and their pass times place the passes of the measured one.
    """
    config = case.run_config()
    count = min(case.microbatches, WARM_UP_MICROBATCHES * case.replicas)
    short = replace(config, train=replace(config.train, global_batch_size=count))
    run_plan = make_run_plan(short)
    job = join(config.parallel)
    check_agreement(job, run_digests(short, run_plan))
    ends = ranks_with_copies(run_plan.plan, tied=config.model.vocabulary.tie_embeddings)
    local_rank = int(os.environ["LOCAL_RANK"])
    links = links_of(run_plan.plan)
    groups = connect(config.parallel, config.parallel.grid, job, local_rank, ends, links)
    state = build_train_state(short, groups, run_plan)
    batch = case.batch()[groups.data.rank :: case.replicas]
    first_loss, costs = _warm_up(state, batch[: count // case.replicas])
    _run_whole_batch(state, config, costs)

    on_device = to_device(batch, groups.device, replicas=groups.data.size)
    recorder = Recorder(groups.pipeline.rank, groups.device)
    groups.world.barrier()
    recorder.begin()
    own: dict[str, Any] = step(state, on_device, WARM_UP_ITERATIONS, recorder)
    own |= {"loss": first_loss, "memory": peak_memory(groups.device).held}
    groups.world.barrier()
    own["rates"] = matrix_rates(case, groups.device)
    own["in_flight"] = state.pipeline.store.peak_in_flight
    timeline = state.pipeline.timeline(recorder)
    ranks = groups.world.all_gather_object(own)
    if groups.world.rank == 0:
        measured = document(case, ranks) | _passes(state, timeline, ranks)
        result.write_text(json.dumps(measured | _promised(state, config)))
    state.close()
    leave(groups)


def _warm_up(state: TrainState, batch: Sequence[Microbatch]) -> tuple[float, Costs]:
    """Run short iterations until the allocator has the memory of the measured iteration.

    Returns:
        This rank's part of the first iteration's loss, and the mean pass times of the last, the
        same on every rank.
    """
    groups, losses = state.groups, []
    on_device = to_device(batch, groups.device, replicas=groups.data.size)
    for iteration in range(WARM_UP_ITERATIONS):
        recorder = Recorder(groups.pipeline.rank, groups.device)
        groups.world.barrier()
        recorder.begin()
        losses.append(step(state, on_device, iteration, recorder)["loss"])
    timeline = groups.data.all_gather_object(state.pipeline.timeline(recorder))[0]
    return losses[0], costs_from_timelines(state.plan, [timeline])


def _run_whole_batch(state: TrainState, config: RunConfig, costs: Costs) -> None:
    """Let ``state`` run the plan of ``config`` from now on."""
    run_plan = make_run_plan(config, costs)
    state.pipeline.replace_plan(run_plan.plan, run_plan.costs)


def step(
    state: TrainState, batch: list[DeviceMicrobatch], iteration: int, recorder: Recorder
) -> dict[str, float]:
    """Run an iteration; return the seconds of schedule and update, and this rank's loss.

    With multi-token prediction the losses of the depths are added to the loss. The schedule has
    seconds of the clock and of the CPU.
    """
    device = state.groups.device.type
    loss, schedule = timed(lambda: state.pipeline.train(batch, iteration, recorder), device)
    assert loss is not None, "nothing stops the iteration"
    _, update = timed(lambda: _update(state), device)
    return {
        "schedule": schedule.seconds,
        "cpu": schedule.cpu,
        "update": update.seconds,
        "loss": float(loss.sum()),
    }


def recorded_step(
    state: TrainState, batch: list[DeviceMicrobatch], iteration: int
) -> tuple[dict[str, float], Recorder]:
    """Run an iteration of a job of one rank; return what ``step`` returns, and its record."""
    recorder = Recorder(0, state.groups.device)
    recorder.begin()
    return step(state, batch, iteration, recorder), recorder


def _update(state: TrainState) -> None:
    """End an iteration as training does; scales and biases that follow from it change too."""
    state.agree_on_scales()
    splits_tokens = state.pipeline.model.tensor.sequence_parts > 1
    loads = summed_loads(state.pipeline.of_layers(), state.groups, splits_tokens=splits_tokens)
    squares = local_sum_of_squares(state.counted, state.kernels, state.groups.device)
    state.groups.world.all_reduce(squares)
    if state.sharded is not None:  # the next iteration takes the step
        state.sharded.open(_RATES, float(squares) ** 0.5)
    else:
        state.optimizer.step(_RATES, float(squares) ** 0.5)
        state.zero_gradients()
    state.expert_biases.update(loads)


def _mean(timeline: Timeline, rank: int, kind: str) -> float:
    """Mean seconds of a kind of pass; 0 where there is none."""
    spans = [s.end - s.start for s in timeline.compute(rank) if s.kind == kind]
    return sum(spans) / len(spans) if spans else 0.0


def _passes(
    state: TrainState, timeline: Timeline, ranks: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return values that references lack: pass times, and the simulator's figures from them."""
    program = state.pipeline.train_program
    costs = costs_from_timelines(program.plan, [timeline])
    work = [timeline.work(rank) for rank in range(timeline.ranks)]
    return {
        "ideal_s": sum(work) / timeline.ranks,
        "cpu_s": sum(rank["cpu"] for rank in ranks),
        "simulated_s": simulate(program, costs).end,
        "pass_ms": {
            kind: [1e3 * _mean(timeline, rank, kind) for rank in range(timeline.ranks)]
            for kind in costs.passes
        },
        "in_flight": [
            rank["in_flight"] / program.plan.chunks / program.plan.slices for rank in ranks
        ],
    }


def _promised(state: TrainState, config: RunConfig) -> dict[str, Any]:
    """Return what the plan says of memory: microbatches in flight, and bytes of tensors.

    Both are given for every pipeline rank.
    """
    plan = state.pipeline.train_program.plan
    held, _ = held_by_ranks(config, replace(state.run_plan, plan=plan))
    return {"promised_in_flight": in_flight(plan), "promised_bytes": list(held)}
