"""Refuses models that no plan can fit into memory, before anything is allocated.

The bytes are counted as in the dry run, for one microbatch; a plan of many microbatches needs at
least as many. The bytes on the host are those of the run's own plan. The usual
cause is a mistyped number on the command line. Without this check the allocator or the kernel would
end the job, and neither would name a flag.
"""

from dataclasses import replace

import torch

from megatron.planning.host_room import activations_on_host, fullest_host, machine_memory
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_memory import held_by_ranks
from megatron.run.run_config import RunConfig
from megatron.schedules.lower import lower
from megatron.schedules.plan import plan_of_one
from megatron.simulator.costs.gpus import GIB
from megatron.simulator.units import MEMORY


def check_memory(config: RunConfig, run_plan: RunPlan, pipeline_rank: int) -> None:
    """Refuse a model if ``pipeline_rank`` cannot hold its parameters, or one microbatch.

    Raises:
        ValueError: names the flags, the bytes and the memory.
    """
    model, train = config.model, config.train
    peaks, memories = held_by_ranks(config, replace(run_plan, plan=plan_of_one(run_plan.plan)))
    own, memory = memories[pipeline_rank], _memory(config.parallel.devices.device)
    weights = float(train.dtype.itemsize * own.count.parameters.all)
    static, whole = own.static, peaks[pipeline_rank]
    if config.parallel.devices.device == "cuda":
        whole += own.outside
    else:  # the host's memory is the same
        static, whole = static + own.on_host, whole + own.on_host
    held = "weights" if train.skip_train else "weights, gradients and optimizer state"
    for needed, what in (
        (
            weights if train.skip_train else static,
            f"--num-layers {model.num_layers}, --hidden-size {model.hidden_size}, "
            f"--ffn-hidden-size {model.mlp.ffn_hidden_size}, "
            f"--kv-channels {model.attention.kv_channels} and "
            f"--vocab-size {model.vocab_size}: {held} of rank {pipeline_rank} take",
        ),
        (
            weights if train.skip_train else whole,
            f"--micro-batch-size {train.micro_batch_size} and --seq-length {model.seq_length}: "
            f"with one microbatch rank {pipeline_rank} holds",
        ),
    ):
        if needed > memory:
            raise ValueError(
                f"{what} {needed / GIB:,.0f} GiB or more, and there are {memory / GIB:,.0f}: lower "
                "them, or take more ranks; --dry-run says what fits"
            )


def check_host(config: RunConfig, run_plan: RunPlan, pipeline_rank: int) -> None:
    """Refuse a run on GPUs that keeps more on this rank's host than the machine has memory.

    Args:
        config: the run.
        run_plan: the plan that the run takes.
        pipeline_rank: of this rank.

    Raises:
        ValueError: names the flags, the bytes and the memory.
    """
    if config.parallel.devices.device != "cuda":  # ``check_memory`` counts these bytes
        return
    plan = run_plan.plan
    _, memories = held_by_ranks(config, replace(run_plan, plan=plan_of_one(plan)))
    moved = [0] * len(memories)
    if plan.offloaded and not config.train.skip_train:
        program = lower(plan, run_plan.costs)
        moved = [activations_on_host(program, own.count, rank) for rank, own in enumerate(memories)]
    states = [own.on_host for own in memories]
    use = fullest_host(config.parallel.placement, states, moved, pipeline_rank)
    told = config.parallel.offload.memory
    memory = machine_memory() if told is None else min(told, machine_memory())
    if not use.fits(memory):
        raise ValueError(
            f"{use.flags}: {use.in_words}, and its memory is {MEMORY.write(memory)}: {use.way_out}"
        )


def _memory(device: str) -> int:
    """Return the bytes of this machine, or of its first GPU."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return machine_memory()
