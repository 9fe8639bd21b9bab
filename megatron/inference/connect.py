"""Connects the ranks of a job that runs a model forward."""

from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from megatron.parallel.environment import Launched
from megatron.parallel.grid import Grid
from megatron.parallel.groups import Groups, make_groups, single_rank

WAIT: Final = timedelta(minutes=10)
"""How long a rank waits for another one."""


def connected(place: Launched) -> Groups:
    """Return this rank's view of the job: a pipeline of all ranks that were launched."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    if place.world_size == 1:
        return single_rank(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=WAIT)
    return make_groups(Grid(pipeline_size=place.world_size), device, WAIT, (0, 0))
