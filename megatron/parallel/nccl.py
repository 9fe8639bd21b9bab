"""How NCCL's communicators share a GPU with the passes, and with one another.

A communication is a kernel of a few thread blocks. The kernel holds its blocks while it waits for
its other ranks, and a pass that runs meanwhile has fewer multiprocessors. So the communicators of
each use have a limit of blocks.

**Which order?** A rank has many communicators, and communications of several may wait on its GPU at
the same time. They must leave room for a communication that another rank waits for. There are two
ways:

* *The host's order.* Every rank issues its communications in one order that all ranks share
  (``schedules.lower``). Suppose that all communications that may wait at once fit on the GPU
  together. Then none takes the place of another, however the device queues them, and each waits
  only for communications that come before it in that order. So one of them can always go on.
* *NCCL's implicit order* (``NCCL_LAUNCH_ORDER_IMPLICIT``, NCCL 2.26): a communication starts only
  after all earlier communications of this host have started, on any communicator. That needs no
  room, but it ties the links to each other: a message waits until an earlier collective, which may
  itself stand in a queue, has started. Below CUDA 12.3 the message even waits for the end of the
  earlier communication, so that an unanswered receive holds up every send.

The host's order is taken where the blocks fit, and NCCL's where they do not.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from megatron.flags.declare import flag
from megatron.flags.ranges import up_to
from megatron.parallel.links import Link

LAUNCH_ORDER: Final = "NCCL_LAUNCH_ORDER_IMPLICIT"

MOST_BLOCKS: Final = 64
"""Thread blocks of a communicator without a limit: NCCL's largest number of channels."""

_BLOCKS: Final = up_to(MOST_BLOCKS)

SPARE_MULTIPROCESSORS: Final = 12
"""Multiprocessors that the host's order leaves to passes. A product that finds none cannot run, and
a communication that waits for its result would never end. Hopper also gives blocks of communicators
without a limit out in clusters, which leaves some of its 132 multiprocessors without room for a
whole cluster."""


@dataclass(frozen=True)
class BlockSettings:
    """Thread blocks of NCCL, by the use of a communicator.

    A collective of the vocabulary layers waits beside passes for its last rank, longer than it
    moves data. So it has only as many blocks as a network of 400 Gb/s needs.

    Attributes:
        control: blocks of sums of a few numbers outside the schedule. Few blocks save memory: every
            block of a communicator has buffers of its own, and a rank has several such
            communicators.
    """

    # fmt: off
    nccl_max_ctas_p2p: int = flag(4,
        "Thread blocks that NCCL may use for the messages of a link between stages.", _BLOCKS)
    nccl_max_ctas_vocab: int = flag(4,
        "Thread blocks that NCCL may use for the collectives of the vocabulary layers.", _BLOCKS)
    nccl_max_ctas_data: int = flag(16,
        "Thread blocks that NCCL may use to reduce gradients and to gather parameters.", _BLOCKS)
    # fmt: on

    control: int = 2

    def of(self, use: str) -> int | None:
        """Return the limit for a use of groups, by its first word; ``None``: NCCL's own.

        Collectives of tensor and context parallelism and exchanges of experts have no limit: mostly
        a pass waits for them. (Some run during a product or during attention, and take
        multiprocessors from it.)
        """
        limits = {
            "transfers": self.nccl_max_ctas_p2p,
            "vocabulary": self.nccl_max_ctas_vocab,
            "gradients": self.nccl_max_ctas_data,
            "ends": self.nccl_max_ctas_data,
            "control": self.control,
        }
        return limits.get(use.partition(" ")[0])

    def at_once(self, links: Collection[Link], pipeline_rank: int, of_passes: int) -> int:
        """Return the most blocks that may wait on the GPU of a pipeline rank at the same time.

        Every link may have a message under way, and each lane one collective.

        Args:
            links: all links of the job.
            pipeline_rank: pipeline rank of the GPU.
            of_passes: collectives of passes, without a limit, that may be under way together.
        """
        own = sum(pipeline_rank in link.ends for link in links)
        collectives = self.nccl_max_ctas_vocab + self.nccl_max_ctas_data + MOST_BLOCKS * of_passes
        return own * self.nccl_max_ctas_p2p + collectives


def set_launch_order(blocks: int, multiprocessors: int) -> None:
    """Choose NCCL's order of launches, before NCCL starts; a variable that is set stays.

    Args:
        blocks: the most blocks that may wait on this GPU at the same time.
        multiprocessors: number of this GPU's multiprocessors; each has room for at least one block.
    """
    fits = blocks + SPARE_MULTIPROCESSORS <= multiprocessors
    os.environ.setdefault(LAUNCH_ORDER, "0" if fits else "1")


_UNHURRIED: Final = frozenset({"gradients", "ends", "control"})
"""Uses of groups for whose results no pass waits."""


def group_options(
    use: str, limits: BlockSettings, timeout: timedelta
) -> "dist.ProcessGroupNCCL.Options":
    """Return the options of a communicator of NCCL.

    Args:
        use: use of the group, as for ``BlockSettings.of``.
        limits: blocks at most, by use.
        timeout: timeout of the group; PyTorch warns if the options have another timeout.
    """
    limit, options = limits.of(use), dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Blocks of high priority take the next free multiprocessors. Reductions of gradients have
    # more blocks than all else, and would take them from transfers that another rank waits for.
    options.is_high_priority_stream = use.partition(" ")[0] not in _UNHURRIED
    if limit is not None:
        options.config.max_ctas = limit
        # Since Hopper, NCCL launches clusters of four blocks. A cluster starts only where one part
        # of the GPU has room for all four at once, and beside passes there is seldom such a part.
        options.config.cga_cluster_size = 1
    return options
