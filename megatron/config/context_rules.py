"""The rules about context parallelism: which sequences and models its ranks can share."""

from collections.abc import Iterator

from megatron.config.declare import Flags
from megatron.config.flags import ModelFlags, ParallelFlags
from megatron.config.layer_flags import LayerFlags


def _sequence(flags: Flags) -> Iterator[str]:
    ranks, length = flags[ParallelFlags].context_parallel_size, flags[ModelFlags].seq_length
    if ranks == 1:
        return
    tensor = flags[ParallelFlags].tensor_model_parallel_size
    parts = tensor if flags[ParallelFlags].sequence_parallel else 1
    if length % (2 * ranks):
        yield (
            f"--context-parallel-size {ranks} does not divide --seq-length {length} into two equal "
            f"chunks for every rank: choose a multiple of {2 * ranks}, or fewer ranks"
        )
    elif length // ranks % parts:
        yield (
            f"--context-parallel-size {ranks} leaves a rank {length // ranks} of the tokens of "
            f"--seq-length {length}, which --sequence-parallel cannot divide among "
            f"--tensor-model-parallel-size {tensor}: choose a multiple of {2 * ranks * parts}"
        )


def _next_tokens(flags: Flags) -> Iterator[str]:
    ranks, depths = flags[ParallelFlags].context_parallel_size, flags[LayerFlags].mtp_num_layers
    if ranks > 1 and depths:
        yield (
            f"--mtp-num-layers {depths} with --context-parallel-size {ranks}: the tokens that "
            "follow the end of a chunk are on another rank: leave one of them out"
        )


CONTEXT_RULES = (_sequence, _next_tokens)
