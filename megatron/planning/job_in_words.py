"""The words of a dry run on the job and the plan that it takes."""

from typing import Final

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.planning.candidate import Candidate
from megatron.planning.run_plan import compares
from megatron.run.parallel_config import ParallelConfig
from megatron.run.run_config import RunConfig
from megatron.schedules.counted import counted
from megatron.simulator.costs.gpus import GIB, Gpu
from megatron.simulator.costs.launch_time import MX
from megatron.simulator.units import TIME

_EIGHT_BITS: Final = (
    "--fp8-format: cuBLAS's products in 8 bits are taken for 1.7 times as fast as those in 16, as "
    "on H100s, and on H100 and H200 those with scales of blocks for 1.65 times; gradients of "
    "weights with scales of blocks, and products of experts, for as fast as those in 16"
)
_MX: Final = (
    "--fp8-recipe mxfp8: products are taken for {times:g} times as fast as those in 16 bits, as "
    "those with one scale for a tensor; nobody has measured it"
)
_WITHOUT_MX: Final = (
    "--fp8-recipe mxfp8: {gpu} has no tensor cores for it, and a run on it is refused; products "
    "are taken for as fast as those in 16 bits"
)
_ONLY_16_BITS: Final = (
    "--fp8-format: {gpu} has no tensor cores for 8 bits, and a run on it is refused; products are "
    "taken for as fast as those in 16"
)
_DOCUMENTS: Final = (
    "--reset-attention-mask: every sample counts as one document, the most work that its documents "
    "can make"
)


def head(config: RunConfig, first: Candidate, gpu: Gpu) -> str:
    """Return the paragraph on the job and its plan.

    ``config`` is the run as the command line asks for it, perhaps with ``auto``.
    """
    plan, counts = first.run_plan.plan, first.run_plan.layers
    layers = " ".join(
        f"{rank}.{chunk}:{count}" for (rank, chunk), count in zip(plan.stages, counts, strict=True)
    )
    further = ""
    if plan.ahead_stage is not None:
        (rank, chunk), depths = plan.stages[plan.ahead_stage], config.model.further.mtp_num_layers
        further = (
            f", and behind those of {rank}.{chunk} {counted(depths, 'layer')} of further tokens"
        )
    return (
        f"{job(first.config, gpu)}\n"
        f"schedule {config.parallel.pipeline_schedule}{_taken(config, first)}\n"
        f"layers by stage (rank.chunk:layers): {layers}{further}"
    )


def _taken(config: RunConfig, first: Candidate) -> str:
    """Return the choice of ``auto``; empty if the run leaves nothing to it."""
    if not compares(config):
        return ""
    chosen = f" with {', '.join(first.config.taken)}" if config.alternatives else ""
    held = counted(first.in_flight, "microbatch in flight")
    return f" takes {first.schedule}{chosen}: {held}, {TIME.write(first.time)} an iteration"


def job(config: RunConfig, gpu: Gpu) -> str:
    """Return the job without its plan: GPUs, replicas, vocabulary and batch."""
    train, replicas, parallel = config.train, config.train.replicas, config.parallel
    of_replica = parallel.grid.world_size // replicas
    alone = "; --dry-run-replicas N plans more" if replicas == 1 else ""
    share = "" if replicas == 1 else " for each replica"
    again = " with recomputed logits" if parallel.vocabulary.vocab_recompute else ""
    microbatches = counted(train.num_microbatches, "microbatch")
    eight_bits = "" if train.eight_bits is None else f"{_of_eight_bits(gpu, train.eight_bits)}\n"
    apart = f"{_DOCUMENTS}\n" if config.data.resets.reset_attention_mask else ""
    return (
        f"dry run, nothing is started: {counted(replicas, 'replica')} of "
        f"{of_replica} x {gpu.name} ({gpu.peak_tflops:g} TFLOP/s, "
        f"{gpu.memory / GIB:.0f} GiB){alone}\n"
        f"{_shared(parallel)}{_spread(config)}{eight_bits}{apart}"
        f"vocabulary {parallel.vocab_parallel}{again}; global batch "
        f"{train.global_batch_size}: {microbatches} of "
        f"{counted(train.micro_batch_size, 'sample')}{share}"
    )


def _of_eight_bits(gpu: Gpu, asked: EightBitSettings) -> str:
    """Return the line on the speed of products in 8 bits."""
    if asked.fp8_recipe == "mxfp8" and gpu.multiplies_eight_bits:
        told = _MX if gpu.has_mx_products else _WITHOUT_MX
        return told.format(gpu=gpu.name, times=MX)
    return _EIGHT_BITS if gpu.multiplies_eight_bits else _ONLY_16_BITS.format(gpu=gpu.name)


def _spread(config: RunConfig) -> str:
    """Return a line on experts that are spread over ranks, if any, and their assumed balance."""
    size, asked = config.parallel.experts.expert_model_parallel_size, config.dry_run
    if size == 1 or asked is None:
        return ""
    factor = asked.dry_run_expert_imbalance
    tokens = f"{factor:g} times the mean" if factor > 1 else "as many as every other"
    return (
        f"experts spread over {size} ranks: the busiest is assumed to have {tokens} of tokens "
        "(--dry-run-expert-imbalance)\n"
    )


def _shared(parallel: ParallelConfig) -> str:
    """Return a line on ranks that share layers or sequences, if any; their figures are equal."""
    tensor, context = parallel.tensor.size, parallel.context.size
    if tensor * context == 1:
        return ""
    sequence = " and the sequence" if parallel.tensor.sequence_parallel else ""
    layers = f" x {tensor} tensor-parallel ranks that share the layers{sequence}"
    tokens = f" x {context} context-parallel ranks that share every sequence"
    return (
        f"pipeline of {parallel.pipeline.size}{layers if tensor > 1 else ''}"
        f"{tokens if context > 1 else ''}; a rank below is any of those {tensor * context}\n"
    )
