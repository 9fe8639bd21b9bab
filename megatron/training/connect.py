"""The first and the last step of a rank with others: it gets its device and groups, and leaves."""

import logging
import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron.parallel.context import CONTEXT_EXCHANGES
from megatron.parallel.environment import set_nccl_environment
from megatron.parallel.grid import Grid
from megatron.parallel.groups import Groups, make_groups, single_rank
from megatron.parallel.links import Link
from megatron.parallel.nccl import set_launch_order
from megatron.parallel.numa import bind_to_gpu, place_on_pci
from megatron.run.parallel_config import ParallelConfig
from megatron.training.rendezvous import Rendezvous

_LOG = logging.getLogger(__name__)


def connect(
    config: ParallelConfig,
    grid: Grid,
    rendezvous: Rendezvous,
    local_rank: int,
    ends: tuple[int, ...],
    links: tuple[Link, ...] = (),
) -> Groups:
    """Make the process groups; every rank calls it with the same values (see ``check_agreement``).

    The pipeline ranks ``ends`` hold copies of the embedding (see ``ranks_with_copies``). With NCCL
    each of the ``links`` between stages (see ``links_of``) is a communicator.
    """
    device = torch.device(config.devices.device)
    timeout = timedelta(minutes=config.devices.distributed_timeout_minutes)
    if config.devices.distributed_backend == "nccl":
        set_nccl_environment()  # in time for NCCL; for the driver, the caller must set it first
    if config.devices.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        if not config.cluster.no_numa_binding:
            _LOG.info(bind_to_gpu(place_on_pci(torch.cuda.get_device_properties(device))))
    if grid.world_size == 1:
        return single_rank(device)
    # No device is given: otherwise PyTorch would make every group by a collective over all ranks.
    dist.init_process_group(
        config.devices.distributed_backend,
        store=dist.PrefixStore("groups", rendezvous.store),
        rank=rendezvous.rank,
        world_size=rendezvous.size,
        timeout=timeout,
    )
    if config.devices.distributed_backend == "gloo":
        return make_groups(grid, device, timeout, ends)
    # Each group makes its communicator now; later, other communicators would be in use.
    limits, here = config.nccl_blocks, grid.axis("pipeline", rendezvous.rank).rank
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    set_launch_order(limits.at_once(links, here, _of_passes(config)), multiprocessors)
    return make_groups(grid, device, timeout, ends, links, limits)


def _of_passes(config: ParallelConfig) -> int:
    """Return how many collectives of passes may be under way together on a rank.

    Passes wait for theirs at once, with two exceptions: the messages of a ring, and in a pair a
    collective of one pass during those of the other.
    """
    grid = config.grid
    shares = max(grid.tensor_size * grid.context_size, grid.expert_block) > 1
    passes_on = grid.context_size > 1 and CONTEXT_EXCHANGES[config.context.exchange].has_ring
    return shares + passes_on + config.pairs.joins


def leave(groups: Groups) -> NoReturn:
    """End this process in good order, when every rank is done.

    The process ends without the interpreter's own shutdown. After that shutdown, the destructors of
    process groups that something still refers to aborted about one process in fifteen ("terminate
    called without an active exception", PyTorch 2.13), and torchrun reported a successful job as
    failed.
    """
    groups.world.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
