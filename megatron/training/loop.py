"""A run from its configuration to the end of training, in the order in which the data flows.

    flags -> configs -> grid -> plan -> my row -> stage -> executor
          -> gradients reduced -> optimizer -> log

``pretrain_gpt.py`` makes the first arrow. The work that needs no other rank comes first, so that
most mistakes are found before the ranks meet. From there on all ranks go in step; rank 0 prints.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from megatron.config.run_config import RunConfig
from megatron.data.microbatch import MicrobatchLoader
from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.lr_schedule import learning_rate
from megatron.parallel.grid import Grid
from megatron.runtime.batch import DeviceMicrobatch, to_device
from megatron.runtime.observer import Observer
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.shape import iteration_flops
from megatron.training.agreement import Digests, check_agreement, data_digests, run_digests
from megatron.training.metrics.log_line import evaluation_lines, introduction
from megatron.training.metrics.meter import Meter, Metered
from megatron.training.metrics.peak_tflops import peak_of_rank
from megatron.training.open_data import Data, open_data
from megatron.training.outputs import check_outputs
from megatron.training.planning.model_shape import shape_of
from megatron.training.planning.run_plan import RunPlan, make_run_plan
from megatron.training.planning.shared_plan import shared_plan
from megatron.training.profiling.observation import Observation
from megatron.training.profiling.torch_trace import profiler
from megatron.training.rendezvous import Rendezvous, UserError
from megatron.training.setup import TrainState, build_train_state, connect, ends_with_copies
from megatron.training.step import Finished, Iteration, TrainStep, make_train_step


@dataclass(frozen=True)
class Prepared:
    """Everything that a rank knows before it has met the others.

    Attributes:
        grid: all ranks of the job.
        run_plan: the plan that they run.
        data: the data that they train on.
        digests: digests of everything that all ranks must agree on.
    """

    grid: Grid
    run_plan: RunPlan
    data: Data
    digests: Digests


def prepare(config: RunConfig, rank: int) -> Prepared:
    """Plan, open the data and check that results can be written: all work without other ranks.

    Raises:
        ValueError: there is no plan, the data is unusable, or a file cannot be written.
        OSError: the data cannot be read.
    """
    check_outputs(config.log, rank)
    grid = config.parallel.grid
    run_plan = _planned(config, rank)
    data = open_data(config.data, config.train, config.model.vocab_size)
    digests = run_digests(config, run_plan) | data_digests(config.train, data)
    return Prepared(grid, run_plan, data, digests)


def _planned(config: RunConfig, rank: int) -> RunPlan:
    """Return the plan; if its search has a time limit, rank 0 alone searches (``shared_plan``)."""
    seconds = config.parallel.search_seconds
    watch = Watch.of_rank(rank, seconds if rank == 0 or seconds is None else 0.0)
    found = make_run_plan(config, watch=watch)
    watch.close()
    return found


def set_up(
    config: RunConfig, prepared: Prepared, rendezvous: Rendezvous, local_rank: int
) -> TrainState:
    """Connect the ranks that have met, and build this rank's row, stages and executor.

    Args:
        config: the run.
        prepared: what ``prepare`` returned.
        rendezvous: where the ranks have met.
        local_rank: this rank's number on its machine, which is also the number of its GPU.

    Raises:
        UserError: the ranks would run different things.
    """
    if config.parallel.search_seconds is not None:
        run_plan = shared_plan(rendezvous, prepared.run_plan)
        digests = {**prepared.digests, **run_digests(config, run_plan)}
        prepared = replace(prepared, run_plan=run_plan, digests=digests)
    check_agreement(rendezvous, prepared.digests)
    ends = ends_with_copies(prepared.run_plan.plan, config.model.tie_embeddings)
    groups = connect(config.parallel, prepared.grid, rendezvous, local_rank, ends)
    return build_train_state(config, groups, prepared.run_plan)


def train(config: RunConfig, state: TrainState, data: Data) -> None:
    """Train to the end of ``config``.

    Args:
        config: the run.
        state: this rank.
        data: what ``open_data`` returned.

    Raises:
        FloatingPointError: the loss or the gradient is infinite or NaN; the message names the
            iteration and the rank that saw it first.
        UserError: the data cannot be read.
    """
    groups, device = state.groups, state.groups.device
    say = print if groups.world.rank == 0 else _silent
    meter = _introduce(config, state, say)
    step = make_train_step(config.optimizer, state)
    last = min(config.train.exit_interval or config.train.train_iters, config.train.train_iters)
    observation = Observation(
        config.log, state, last - 1, lambda costs: make_run_plan(config, costs).plan, say
    )
    with profiler(config.log, groups.world.rank) as step_profiler:
        for iteration in range(last):
            if observation.times(iteration):
                meter.report(step.settle())
            with meter.paused():
                observer = observation.begin(iteration)
            finished = run_iteration(
                step, config.optimizer, data.train, device, iteration, observer
            )
            meter.ended(iteration)
            meter.report(finished)
            with meter.paused():
                observation.finished(iteration)
            if data.valid is not None and _is_due(iteration, config.train.eval_interval):
                meter.report(step.settle())
                with meter.paused():
                    loss = evaluate(state, data.valid, config.train.eval_iters)
                say(evaluation_lines(iteration + 1, loss), flush=True)
            with meter.paused():  # the profiler may write its trace here
                step_profiler.step()
    meter.report(step.settle())
    if last == config.train.exit_interval:
        say(f"exiting at iteration {last} (--exit-interval)", flush=True)
    meter.report_memory(last)
    meter.report_post_validation()
    state.pipeline.close()


def run_iteration(
    step: TrainStep,
    optimizer: OptimizerConfig,
    loader: MicrobatchLoader,
    device: torch.device,
    iteration: int,
    observer: Observer | None = None,
) -> Finished | None:
    """Run one iteration, and return the iteration that this makes final (``TrainStep.train``).

    Args:
        step: runs the schedule, reduces the gradients and takes the optimizer's step.
        optimizer: learning rate by samples.
        loader: the training data.
        device: of this rank.
        iteration: counted from 0.
        observer: is told of passes and communication.

    Raises:
        FloatingPointError: as ``train``.
        UserError: as ``train``.
    """
    lr = learning_rate(optimizer, loader.consumed_samples)
    batch = _next_batch(loader, device)
    return step.train(Iteration(iteration, batch, lr, loader.consumed_samples), observer)


def evaluate(state: TrainState, loader: MicrobatchLoader, eval_iters: int) -> float:
    """Return the mean loss over the next ``eval_iters`` global batches of ``loader``."""
    total = torch.zeros((), dtype=torch.float64, device=state.groups.device)
    for _ in range(eval_iters):
        batch = _next_batch(loader, state.groups.device)
        total += state.pipeline.evaluate(batch)
    state.groups.pipeline.all_reduce(total)
    return float(total) / eval_iters


def _next_batch(loader: MicrobatchLoader, device: torch.device) -> list[DeviceMicrobatch]:
    """Read the next batch; report faults of the data as the user's mistakes."""
    try:
        batch = loader.next_batch()
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    return to_device(batch, device)


def _introduce(config: RunConfig, state: TrainState, say: Callable[..., None]) -> Meter:
    """Print the layout, the sizes and how FLOPs are counted; return the meter of the run."""
    groups, model, train_config = state.groups, config.model, config.train
    groups.world.barrier()  # all ranks measure the peak at the same time, as under load
    peak = peak_of_rank(groups.device, train_config.dtype, config.log.peak_tflops)
    own = sum(p.parameter.numel() for p in state.parameters if p.counts_in_norm)
    counts = groups.pipeline.all_gather_object(own)
    batch = train_config.global_batch_size
    flops = iteration_flops(shape_of(model, 1), model.num_layers, batch)
    lines = introduction(config.parallel, train_config, model.vocab_size, counts, flops, peak)
    for line in (*config.notes, *lines):
        say(line, flush=True)
    metered = Metered(config.log.log_interval, train_config.train_iters, batch, flops, peak.tflops)
    return Meter(metered, config.optimizer, groups, say)


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and (iteration + 1) % interval == 0


def _silent(*_: object, **__: object) -> None:
    """Print nothing: only rank 0 prints."""
