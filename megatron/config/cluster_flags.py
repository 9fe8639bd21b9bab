"""The flags of GPUs and the machines that they are in: how ranks talk, and where they run."""

from dataclasses import dataclass
from typing import Final

from megatron.config.declare import COUNT, NOT_NEGATIVE, POSITIVE, RANKS, flag
from megatron.parallel.nccl import BlockLimits
from megatron.schedules.treatments import Treatment
from megatron.simulator.costs.gpus import Gpu, interconnect
from megatron.simulator.costs.machines import Interconnect

MACHINE_RANKS: Final = 8
"""GPUs of a machine in a dry run that does not say."""

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

    ranks_per_node: int | None = flag(None,
        "Ranks of a machine, which links connect; between machines there is a network.", RANKS,
        unset="as the launcher says, or 8 in a dry run")
    link_bandwidth: float | None = flag(None,
        "GB/s of one direction from a GPU to another of its machine, for plans and predictions.",
        POSITIVE, unset="by the GPU")
    link_latency: float | None = flag(None,
        "Microseconds of a message to another GPU of the machine, in addition to its bytes.",
        NOT_NEGATIVE, unset="by the GPU")
    network_bandwidth: float | None = flag(None,
        "GB/s of one direction from a GPU to one of another machine, for plans and predictions.",
        POSITIVE, unset="by the GPU")
    network_latency: float | None = flag(None,
        "Microseconds of a message to a GPU of another machine, in addition to its bytes.",
        NOT_NEGATIVE, unset="by the GPU")


# fmt: on
def interconnect_of(
    flags: ClusterFlags, gpu: Gpu, treatment: Treatment, ranks: int
) -> Interconnect:
    """Return the links of a job.

    Args:
        flags: what is said of them.
        gpu: of every rank.
        treatment: of the vocabulary.
        ranks: of a machine, if nothing is said.
    """
    return interconnect(
        gpu,
        flags.ranks_per_node or ranks,
        treatment,
        (_times(1e9, flags.link_bandwidth), _times(1e-6, flags.link_latency)),
        (_times(1e9, flags.network_bandwidth), _times(1e-6, flags.network_latency)),
    )


def _times(unit: float, value: float | None) -> float | None:
    return None if value is None else unit * value


def block_limits(flags: ClusterFlags) -> BlockLimits:
    """Return how many thread blocks NCCL may use."""
    return BlockLimits(
        transfers=flags.nccl_max_ctas_p2p,
        vocabulary=flags.nccl_max_ctas_vocab,
        gradients=flags.nccl_max_ctas_data,
    )
