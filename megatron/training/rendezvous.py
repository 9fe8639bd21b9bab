"""How ranks exchange words without process groups: where they meet, and who speaks for all.

The ranks meet in a store of keys and values. The store exists before the first process group, and
still works after a process group has broken.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron.config.run_config import ParallelConfig


class UserError(Exception):
    """A user's mistake, found after the ranks have met; it is told without a traceback."""


@dataclass(frozen=True)
class Rendezvous:
    """One rank's view of the job.

    Attributes:
        store: keys and values that all ranks share.
        rank: rank of this process.
        size: number of ranks of the job.
    """

    store: dist.Store
    rank: int
    size: int

    def all_gather(self, value: str) -> list[str]:
        """Return every rank's ``value``, in the order of the ranks; call it once in a job."""
        ranks = range(self.size)
        self.store.set(f"value {self.rank}", value)
        gathered = [self.store.get(f"value {rank}").decode() for rank in ranks]
        self.store.set(f"gathered {self.rank}", "")
        if self.rank == 0:  # rank 0 may host the store, and may end next
            self.store.wait([f"gathered {rank}" for rank in ranks])
        return gathered

    def takes_the_word(self) -> bool:
        """Return whether this rank is the first that wants to say why the job ends.

        Raises:
            torch.distributed.DistError: the rank that hosted the store has ended.
        """
        return self.store.add("told", 1) == 1


def join(config: ParallelConfig) -> Rendezvous:
    """Meet the other ranks of the job at the address in torchrun's environment variables."""
    if config.grid.world_size == 1:
        return Rendezvous(dist.HashStore(), 0, 1)
    timeout = timedelta(minutes=config.timeout_minutes)
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return Rendezvous(dist.PrefixStore("job", store), rank, size)
