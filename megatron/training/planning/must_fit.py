"""Refuses models that cannot be in memory whatever happens, before anything is allocated.

What is counted here is a part of what a run needs, so that nothing is refused that could run; the
dry run predicts the whole. The numbers that are refused are mostly mistyped ones, with which the
allocator, or the kernel, would end the job without naming a flag.
"""

import os

import torch

from megatron.config.run_config import RunConfig
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.gpus import GIB
from megatron.simulator.costs.model_bytes import parameters
from megatron.training.planning.model_shape import shape_of
from megatron.training.planning.run_plan import RunPlan

_LEAST_BYTES = 6
"""Bytes of a parameter on every rank that has it: its weight in bf16 and its gradient in fp32."""


def check_memory(config: RunConfig, run_plan: RunPlan, pipeline_rank: int) -> None:
    """Refuse a model of which one rank cannot hold the parameters, or a microbatch's activation.

    Args:
        config: the run.
        run_plan: its plan, and the layers of its stages.
        pipeline_rank: whose parameters are counted.

    Raises:
        ValueError: names the flags, the bytes and the memory.
    """
    model, micro = config.model, config.train.micro_batch_size
    shape = shape_of(model, micro)
    treatment = TREATMENTS[config.parallel.vocab_parallel]
    counts = parameters(
        shape, run_plan.plan.stages, run_plan.layers, treatment, tied=model.tie_embeddings
    )
    tokens = shape.tokens // config.parallel.context_size
    memory = _memory(config.parallel.device)
    for needed, what in (
        (
            _LEAST_BYTES * counts[pipeline_rank],
            f"--num-layers {model.num_layers}, --hidden-size {model.hidden_size}, "
            f"--ffn-hidden-size {model.ffn_hidden_size}, --kv-channels {model.kv_channels} and "
            f"--vocab-size {model.vocab_size}: weights and gradients",
        ),
        (
            2 * tokens * max(model.hidden_size, model.ffn_hidden_size),
            f"--micro-batch-size {micro} and --seq-length {model.seq_length}: one activation",
        ),
    ):
        if needed > memory:
            raise ValueError(
                f"{what} of rank {pipeline_rank} take {needed / GIB:,.0f} GiB or more, and there "
                f"are {memory / GIB:,.0f}: lower them, or take more ranks; --dry-run says what fits"
            )


def _memory(device: str) -> int:
    """Return the bytes of this machine, or of its first GPU."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
