"""How ranks exchange words without process groups: where they meet, and who reports a failure.

The ranks meet in a store of keys and values. The store exists before the first process group, and
still works after a process group has broken.
"""

import sys
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron.config.command_line import SILENT_SECONDS
from megatron.config.run_config import ParallelConfig


class UserError(Exception):
    """A user's mistake, found after the ranks have met; it is reported without a traceback."""


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

    def tell(self, message: str) -> None:
        """Print why this rank is about to end, unless another rank has printed its reason.

        Returns only after a reason is printed, because the launcher ends all ranks as soon as one
        of them is gone.
        """
        try:
            if self.store.add("told", 1) == 1:
                print(message, file=sys.stderr, flush=True)
                self.store.set("printed", "")
            else:
                self.store.wait(["printed"], timedelta(seconds=SILENT_SECONDS))
        except dist.DistError:
            pass  # the rank that hosted the store is gone, and has printed its reason

    @property
    def is_told(self) -> bool:
        """Whether a rank has printed why the job ends."""
        try:
            return self.store.check(["told"])
        except dist.DistError:
            return False


def join(config: ParallelConfig) -> Rendezvous:
    """Meet the other ranks of the job at the address in torchrun's environment variables."""
    if config.grid.world_size == 1:
        return Rendezvous(dist.HashStore(), 0, 1)
    timeout = timedelta(minutes=config.timeout_minutes)
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return Rendezvous(dist.PrefixStore("job", store), rank, size)
