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
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from megatron.parallel.settings import BlockSettings

LAUNCH_ORDER: Final = "NCCL_LAUNCH_ORDER_IMPLICIT"

SPARE_MULTIPROCESSORS: Final = 12
"""Multiprocessors that the host's order leaves to passes. A product that finds none cannot run, and
a communication that waits for its result would never end. Hopper also gives blocks of communicators
without a limit out in clusters, which leaves some of its 132 multiprocessors without room for a
whole cluster."""


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
