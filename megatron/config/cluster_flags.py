"""The flags of GPUs and the machines that they are in: how ranks talk, and where they run."""

from dataclasses import dataclass

from megatron.config.declare import COUNT, flag
from megatron.parallel.nccl import BlockLimits

# The formatter is off so that the flags read as a table.
# fmt: off


@dataclass(frozen=True)
class ClusterFlags:
    """GPUs and machines."""

    nccl_max_ctas_p2p: int = flag(4,
        "Thread blocks that NCCL may use for the messages of a link between stages.", COUNT)
    nccl_max_ctas_vocab: int = flag(8,
        "Thread blocks that NCCL may use for the collectives of the vocabulary layers.", COUNT)
    nccl_max_ctas_data: int = flag(16,
        "Thread blocks that NCCL may use to reduce gradients and to gather parameters.", COUNT)


# fmt: on
def block_limits(flags: ClusterFlags) -> BlockLimits:
    """Return how many thread blocks NCCL may use."""
    return BlockLimits(
        transfers=flags.nccl_max_ctas_p2p,
        vocabulary=flags.nccl_max_ctas_vocab,
        gradients=flags.nccl_max_ctas_data,
    )
