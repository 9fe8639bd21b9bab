"""The NCCL communicators of a pipeline's ranks, and an estimate of the GPU memory that they take.

NCCL gives every channel of a communicator a buffer for each rank that it receives from, and a
smaller one for each rank that it sends to. No PyTorch figure shows these buffers, and a rank has
many communicators: one for each use of its groups, and one for each link.

**The estimate.** A communicator for collectives takes

    channels x neighbours x (RECEIVER + SENDER) bytes

where a rank has one neighbour in a group of two, and two neighbours in larger groups. NCCL's ring
and trees connect a rank with its neighbours in both directions, and share the buffers. Ranks that
exchange tokens for experts are all neighbours of each other. A link takes
``channels x RECEIVER`` bytes at its receiver, and ``channels x SENDER`` bytes at its sender. A
communicator has as many channels as its limit of thread blocks (``max_ctas``).

**Sources.** ``NCCL_BUFFSIZE`` is 4 MiB by default (NVIDIA's "Environment Variables"). NCCL's
``src/init.cc`` has 0.5 MiB for the LL protocol and 4.7 MiB for LL128 in addition, 9.2 MiB together.
Device memory comes in units of 2 MiB, so a receiver's buffer takes 10 MiB and a sender's control
words 2: issue 1685 of NVIDIA/nccl lists exactly these two sizes. There all-to-all on 8 H100s took
3.3 GB with 7 peers and 32 channels, and this estimate says 2.8 GB.

**Measured.** Over sockets, on one H200, a communicator of two ranks took 34 to 38 MB with 1, 2, 4
and 8 blocks; within a machine nobody has measured it. The estimate counts every communicator as
used, and every connection as one within a machine. It leaves out NVLink SHARP's buffers, and what
NCCL takes once in a process: 1.1 GB on that H200, with the first communicator.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Final

import torch

from megatron.parallel.grid import Grid, Tiling
from megatron.parallel.groups import STATE, connect_grid
from megatron.parallel.links import Link
from megatron.parallel.settings import BlockSettings

MIB: Final = float(1 << 20)

RECEIVER: Final = 10 * MIB
"""Bytes of a channel at the end of a connection that receives."""

SENDER: Final = 2 * MIB
"""Bytes of a channel at the end of a connection that sends."""

CHANNELS_WITHOUT_LIMIT: Final = 16
"""Channels of a communicator without a limit of blocks: 8 H800s in one machine report 16 (issue 892
of NVIDIA/nccl)."""

_ALIKE: Final = 3
"""More replicas than this change the number of neighbours in no group."""


@dataclass(frozen=True)
class Communicators:
    """The communicators of a rank.

    Attributes:
        number: how many there are.
        estimated: bytes of GPU memory that they take, by estimate.
    """

    number: int = 0
    estimated: float = 0.0

    def __add__(self, estimated: float) -> "Communicators":
        return Communicators(self.number + 1, self.estimated + estimated)


@lru_cache(maxsize=256)
def communicators(
    grid: Grid, ends: tuple[int, ...], links: tuple[Link, ...], limits: BlockSettings
) -> tuple[Communicators, ...]:
    """Return the communicators of a rank at every pipeline rank; all ranks there have the same.

    Args:
        grid: all ranks of the job.
        ends: pipeline ranks with copies of the embedding, as for ``make_groups``.
        links: links between stages; each has a communicator of its own.
        limits: most thread blocks of the communicators.
    """
    made: list[tuple[str, Tiling]] = []
    alike = (
        _ALIKE * grid.expert_block // gcd(grid.expert_block, grid.tensor_size * grid.context_size)
    )
    grid = replace(grid, data_size=min(grid.data_size, alike))
    connect_grid(grid, 0, torch.device("cpu"), ends, lambda *group: made.append(group), links)
    first = _first_ranks(grid)
    by_name = {f"transfers {link}": link for link in links}
    found = [Communicators() for _ in first]
    for use, tiling in made:
        if use == STATE:  # messages between hosts go by gloo
            continue
        channels = limits.of(use) or CHANNELS_WITHOUT_LIMIT
        for ranks in tiling:
            for pipeline in (first[rank] for rank in ranks if rank in first):
                most = len(ranks) if use == "experts" else 2
                estimated = _of_connections(by_name.get(use), pipeline, len(ranks), most)
                found[pipeline] += channels * estimated
    return tuple(found)


def _first_ranks(grid: Grid) -> dict[int, int]:
    """Return the first rank of the job on every pipeline rank, with that pipeline rank."""
    first: dict[int, int] = {}
    for rank in range(grid.world_size):
        first.setdefault(grid.coordinates(rank).pipeline, rank)
    return {rank: pipeline for pipeline, rank in first.items()}


def _of_connections(link: Link | None, pipeline: int, ranks: int, most: int) -> float:
    """Return the bytes of one channel of a communicator.

    Args:
        link: the link that has the communicator; ``None``: the communicator is for collectives.
        pipeline: the pipeline rank whose memory holds the bytes.
        ranks: number of ranks of the communicator.
        most: the most neighbours of a rank.
    """
    if link is None:
        return min(ranks - 1, most) * (RECEIVER + SENDER)
    return RECEIVER if pipeline == link.receiver else SENDER
