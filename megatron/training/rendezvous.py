"""How ranks exchange words without process groups: where they meet, and who speaks for all.

The ranks meet in a store of keys and values. The store exists before the first process group, and
still works after a process group has broken.
"""

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from megatron.config.run_config import ParallelConfig
from megatron.parallel.environment import missing_for_meeting

RESOLVE_SECONDS: Final = 15.0
"""How long the name of rank 0's host may take to become known; a cluster's name server may be late.
"""


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


def check_meeting_place(world_size: int, seconds: float = RESOLVE_SECONDS) -> None:
    """Check that the ranks can know where they meet, before they wait for each other there.

    Args:
        world_size: ranks of the job.
        seconds: how long the name of a host may be unknown.

    Raises:
        ValueError: a variable is missing, or names a host that is not known.
    """
    if world_size == 1:
        return
    if missing := list(missing_for_meeting()):
        raise ValueError("\n".join(missing))
    host, port, begun = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], time.monotonic()
    while True:
        try:
            socket.getaddrinfo(host, port)
        except (OSError, UnicodeError) as error:
            if time.monotonic() - begun >= seconds:
                raise ValueError(
                    f"MASTER_ADDR={host} is no host that this machine knows ({error}): set it to "
                    "the name or the address of rank 0's machine"
                ) from error
            time.sleep(1)
        else:
            return


def join(config: ParallelConfig) -> Rendezvous:
    """Meet the other ranks of the job at the address in torchrun's environment variables.

    Raises:
        ValueError: the ranks have not met; names the address and the ways out.
    """
    size = config.grid.world_size
    if size == 1:
        return Rendezvous(dist.HashStore(), 0, 1)
    check_meeting_place(size)
    timeout = timedelta(minutes=config.timeout_minutes)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        raise ValueError(
            f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}: the "
            f"{size} ranks cannot meet there ({str(error).splitlines()[0]}): start all of them, "
            "rank 0 on that host, choose a port that is free there and open to the others, and "
            "raise --distributed-timeout-minutes if they start long after one another"
        ) from error
    store.set_timeout(timeout)
    return Rendezvous(dist.PrefixStore("job", store), rank, size)
