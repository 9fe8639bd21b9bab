"""The flags of GPUs and the machines that they are in: how ranks talk, and where they run."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from megatron.config.declare import RANKS, Range, flag, up_to
from megatron.parallel.grid import Order
from megatron.parallel.nccl import MOST_BLOCKS, BlockLimits
from megatron.simulator.costs.collective_time import Links
from megatron.simulator.costs.gpus import Gpu

MACHINE_RANKS: Final = 8
"""GPUs of a machine in a dry run that does not say."""

_BLOCKS: Final = up_to(MOST_BLOCKS)
_BANDWIDTH: Final = Range("at least 0.001 and at most 1,000,000", lambda x: 1e-3 <= x <= 1e6)
_LATENCY: Final = Range("at least 0 and at most 100,000", lambda x: 0 <= x <= 1e5)
# Beyond these a number is in another unit, and plans would be made of waiting alone.

# The formatter is off so that the flags read as a table.
# fmt: off


@dataclass(frozen=True)
class ClusterFlags:
    """GPUs and machines."""

    nccl_max_ctas_p2p: int = flag(4,
        "Thread blocks that NCCL may use for the messages of a link between stages.", _BLOCKS)
    nccl_max_ctas_vocab: int = flag(4,
        "Thread blocks that NCCL may use for the collectives of the vocabulary layers.", _BLOCKS)
    nccl_max_ctas_data: int = flag(16,
        "Thread blocks that NCCL may use to reduce gradients and to gather parameters.", _BLOCKS)

    ranks_per_node: int | None = flag(None,
        "Ranks of a machine, which links connect; between machines there is a network.", RANKS,
        unset="as the launcher says, or 8 in a dry run")
    rank_order: Order | None = flag(None,
        "Which coordinate of consecutive ranks changes first, after that of tensor parallelism: "
        "the replica, as in Megatron, or the pipeline rank.", excludes="--use-tp-pp-dp-mapping",
        unset="so that fewest hops of a pipeline leave a machine")
    no_numa_binding: bool = flag(False,
        "Let ranks run on any CPU, not on those that are close to their GPU.")
    link_bandwidth: float | None = flag(None,
        "GB/s of one direction from a GPU to another of its machine, for plans and predictions.",
        _BANDWIDTH, unset="by the GPU")
    link_latency: float | None = flag(None,
        "Microseconds of a message to another GPU of the machine, in addition to its bytes.",
        _LATENCY, unset="by the GPU")
    network_bandwidth: float | None = flag(None,
        "GB/s of one direction from a GPU to one of another machine, for plans and predictions.",
        _BANDWIDTH, unset="by the GPU")
    network_latency: float | None = flag(None,
        "Microseconds of a message to a GPU of another machine, in addition to its bytes.",
        _LATENCY, unset="by the GPU")


# fmt: on
def ranks_of_machine(
    flags: ClusterFlags, *, dry_run: bool, environment: Mapping[str, str] = os.environ
) -> int | None:
    """Return the ranks of a machine, as the flags say, or the launcher; ``None``: not known."""
    launched = int(environment.get("LOCAL_WORLD_SIZE") or 0) or None
    return flags.ranks_per_node or (MACHINE_RANKS if dry_run else launched)


def links_of(flags: ClusterFlags, gpu: Gpu) -> Links:
    """Return what connects the GPUs of a job.

    Args:
        flags: what is said of the links.
        gpu: of every rank.
    """
    return gpu.links(
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
