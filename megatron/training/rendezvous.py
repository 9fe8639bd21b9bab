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

    def gather(self, value: str) -> list[str] | None:
        """Return every rank's ``value`` on rank 0, by rank, and ``None`` elsewhere; call it once.

        Only rank 0 reads the values: a job of n ranks costs 2 (n - 1) operations of the store.
        """
        if self.rank != 0:
            self.store.set(f"value {self.rank}", value)
            return None
        others = range(1, self.size)
        return [value, *(self.store.get(f"value {rank}").decode() for rank in others)]

    def broadcast(self, value: str | None) -> str:
        """Return rank 0's ``value`` on every rank; call it once.

        Rank 0 returns last, because it may host the store and may end next. That costs a job of n
        ranks 2 n + 1 operations of the store.

        Args:
            value: the word of rank 0; ``None`` on the others.
        """
        if value is None:
            value = self.store.get("word").decode()
            if self.store.add("heard", 1) == self.size - 1:
                self.store.set("heard by all", "")
        elif self.size > 1:
            self.store.set("word", value)
            self.store.wait(["heard by all"])
        return value

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
