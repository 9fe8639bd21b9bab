"""Prepares training: first each rank does all work that needs no other rank, then the ranks meet.

So most mistakes are found before any rank waits for another.
"""

import json
import pickle
from dataclasses import asdict, dataclass, replace
from typing import Final

import torch
import torch.distributed as dist

from megatron.data.index_builder import load_index_builder
from megatron.parallel.grid import Grid
from megatron.planning.limit_of_rank import memory_of, smallest_memory
from megatron.planning.must_fit import check_host, check_memory
from megatron.planning.planned_run import RunPlan
from megatron.planning.prepared_advice import prepared_advice
from megatron.planning.run_plan import (
    COMPARISON_SECONDS,
    make_run_plan,
    only_rank_0_plans,
)
from megatron.planning.settled import settled
from megatron.run.own_memory import OwnMemory
from megatron.run.run_config import RunConfig
from megatron.runtime.communicator import links_of
from megatron.runtime.embedding_copies import ranks_with_copies
from megatron.schedules.search.watch import Watch
from megatron.training.agreement import (
    Digests,
    check_agreement,
    data_digests,
    gpu_digests,
    run_digests,
)
from megatron.training.connect import connect
from megatron.training.failure import form_of_report
from megatron.training.open_checkpoints import import_checkpoints
from megatron.training.open_data import Data, open_data
from megatron.training.open_prompts import open_prompts
from megatron.training.out_of_memory import record_memory
from megatron.training.outputs import check_outputs
from megatron.training.own_code import code_digests
from megatron.training.own_tokens import kept_tokens, slices_of
from megatron.training.rendezvous import Rendezvous, UserError
from megatron.training.setup import TrainState, build_train_state

_PLAN_KEY: Final = "plan of rank 0"


@dataclass(frozen=True)
class Prepared:
    """Everything that a rank knows before it has met the others.

    Attributes:
        asked: the run as the flags ask for it.
        config: the run with all that its plan has decided.
        grid: all ranks of the job.
        run_plan: the plan of the run.
        data: the data of the run.
        digests: digests of everything that all ranks must agree on.
        advice: lines for a rank that runs out of memory.
    """

    asked: RunConfig
    config: RunConfig
    grid: Grid
    run_plan: RunPlan
    data: Data
    digests: Digests
    advice: tuple[str, ...] = ()


def prepare(config: RunConfig, rank: int) -> Prepared:
    """Plan, open the data and check that results can be written: all work without other ranks.

    Raises:
        ValueError: there is no plan, the data is unusable, or a file cannot be written.
        OSError: the data cannot be read.
    """
    import_checkpoints(config.checkpoint)
    check_outputs(config.log, rank, config.checkpoint.save)
    grid = config.parallel.grid
    asked, run_plan = config, _planned(config, rank)
    config = settled(asked, run_plan)
    pipeline_rank = grid.axis("pipeline", rank).rank
    check_memory(config, run_plan, pipeline_rank)
    if not only_rank_0_plans(asked):
        check_host(config, run_plan, pipeline_rank)
    data = _opened(config, grid, rank)
    digests = code_digests() | run_digests(config, run_plan) | data_digests(config.train, data)
    prepared = Prepared(asked, config, grid, run_plan, data, digests)
    return prepared if only_rank_0_plans(asked) else _with_advice(prepared, rank)


def _opened(config: RunConfig, grid: Grid, rank: int) -> Data:
    """Open the data of a rank."""
    if not config.data.mock_data and (report := form_of_report()) is not None:
        load_index_builder().report_bus_errors(*report)
    place = grid.coordinates(rank)
    data = open_data(
        config.data,
        config.train,
        config.model.vocab_size,
        place,
        kept_tokens(config, place.context),
        config.model.further.mtp_num_layers,
    )
    return replace(data, prompts=open_prompts(config))


def _with_advice(prepared: Prepared, rank: int) -> Prepared:
    """Add advice for a rank that runs out of memory; the plan must be decided already."""
    pipeline_rank = prepared.grid.axis("pipeline", rank).rank
    advice = prepared_advice(prepared.config, prepared.run_plan, pipeline_rank)
    return replace(prepared, advice=advice)


def _planned(config: RunConfig, rank: int) -> RunPlan:
    """Return the plan; if ``only_rank_0_plans``, ``agreed`` shares it."""
    own = rank == 0 or not only_rank_0_plans(config)
    watch = Watch.of_rank(rank, config.parallel.planning.search_seconds if own else 0.0)
    found = make_run_plan(config, watch=watch, seconds=COMPARISON_SECONDS, checks=own)
    watch.close()
    return found


def shared_plan(rendezvous: Rendezvous, own: RunPlan) -> RunPlan:
    """Return the plan that rank 0 has found, on all ranks; call it once in a job."""
    if rendezvous.rank == 0:
        rendezvous.store.set(_PLAN_KEY, pickle.dumps(own).hex())
    found: RunPlan = pickle.loads(bytes.fromhex(rendezvous.store.get(_PLAN_KEY).decode()))
    return found


def agreed(prepared: Prepared, rendezvous: Rendezvous, local_rank: int) -> Prepared:
    """Check that all ranks agree; if ``only_rank_0_plans``, all ranks take its plan.

    ``local_rank`` is this rank's number on its machine, which is also the number of its GPU.

    Raises:
        UserError: the ranks would run different things, or the plan that they take keeps more on
            this rank's host than the machine has memory, or no plan keeps to the limit by memory
            on the rank with the least memory.
    """
    if only_rank_0_plans(prepared.asked):
        prepared = _for_all_memories(prepared, rendezvous)
        run_plan = shared_plan(rendezvous, prepared.run_plan)
        prepared = _with_advice(_having_taken(prepared, run_plan, rendezvous), rendezvous.rank)
    check_agreement(rendezvous, {**prepared.digests, **gpu_digests(prepared.config, local_rank)})
    return prepared


def _for_all_memories(prepared: Prepared, rendezvous: Rendezvous) -> Prepared:
    """Return what a rank has prepared, planned for the smallest memory of all ranks.

    Before the ranks meet, rank 0 has planned for its own memory. If another rank has less, rank 0
    plans again. Without a limit by memory the ranks tell each other nothing.

    Raises:
        UserError: on rank 0: no plan keeps to the limit on the rank with the least memory.
    """
    if not prepared.asked.parallel.planning.is_limited_by_memory:
        return prepared
    smallest = shared_memory(rendezvous, prepared.asked)
    asked = prepared.asked.for_memory(smallest)
    prepared = replace(prepared, asked=asked)
    if rendezvous.rank != 0 or smallest == memory_of(prepared.config):
        return prepared
    try:
        return replace(prepared, run_plan=_planned(asked, rank=0))
    except ValueError as error:
        raise UserError(str(error)) from error


def shared_memory(rendezvous: Rendezvous, config: RunConfig) -> OwnMemory:
    """Return the smallest memory of all ranks, on all of them; call it once in a job."""
    own_keys = replace(rendezvous, store=dist.PrefixStore("memory", rendezvous.store))
    gathered = own_keys.gather(json.dumps(asdict(memory_of(config))))
    found = None
    if gathered is not None:
        all_memories = [OwnMemory(**json.loads(own)) for own in gathered]
        smallest = smallest_memory(config, all_memories)
        rank = all_memories.index(smallest)
        if smallest != all_memories[0]:
            smallest = replace(smallest, named=f"{smallest.named} (rank {rank} has the least)")
        found = json.dumps(asdict(smallest))
    return OwnMemory(**json.loads(own_keys.broadcast(found)))


def _having_taken(prepared: Prepared, run_plan: RunPlan, rendezvous: Rendezvous) -> Prepared:
    """Return what a rank has prepared, with the plan that the job takes.

    If that plan has other slices than the rank's own, the rank reads other tokens, so data is
    opened again.
    """
    config, data, digests = settled(prepared.asked, run_plan), prepared.data, prepared.digests
    try:
        check_host(config, run_plan, prepared.grid.axis("pipeline", rendezvous.rank).rank)
    except ValueError as error:
        raise UserError(str(error)) from error
    if slices_of(config) != slices_of(prepared.config):
        data = _opened(config, prepared.grid, rendezvous.rank)
        digests = {**digests, **data_digests(config.train, data)}
    digests = {**digests, **run_digests(config, run_plan)}
    return replace(prepared, config=config, run_plan=run_plan, data=data, digests=digests)


def set_up(prepared: Prepared, rendezvous: Rendezvous, local_rank: int) -> TrainState:
    """Connect the ranks that have met, and build this rank's row, stages and executor.

    ``local_rank`` is this rank's number on its machine, which is also the number of its GPU.
    """
    config = prepared.config
    ends = ranks_with_copies(prepared.run_plan.plan, tied=config.model.vocabulary.tie_embeddings)
    links = links_of(prepared.run_plan.plan)
    groups = connect(config.parallel, prepared.grid, rendezvous, local_rank, ends, links)
    if groups.device.type == "cuda":  # otherwise an environment variable would decide
        torch.set_float32_matmul_precision(config.train.precision.fp32_matmul_precision)
    record_memory(config.log, groups.device)
    return build_train_state(config, groups, prepared.run_plan)
