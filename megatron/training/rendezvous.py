"""How ranks exchange words without process groups: where they meet, and who speaks for all.

The ranks meet in a store of keys and values. The store exists before the first process group, and
still works after a process group has broken. When torchrun restarts a job, it keeps the store with
all keys of earlier launches. So the ranks of a launch first agree on a new word, and begin all
their keys with this word.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from megatron.parallel.environment import missing_for_meeting
from megatron.run.parallel_config import ParallelConfig
from megatron.training.words import ranks_in_words

_LOG = logging.getLogger(__name__)

TELL_SECONDS: Final = 15.0
"""Seconds between two messages on the ranks that a rank waits for."""

LOOK_SECONDS: Final = 0.5
"""Seconds between two looks of rank 0 for ranks that had come and were started anew."""

FIRST_PAUSE, LAST_PAUSE = 0.01, 1.0
"""Seconds between two looks for a key, at first and after a while."""

RESOLVE_SECONDS: Final = 15.0
"""How long the name of rank 0's host may take to become known; a cluster's name server may be late.
"""

CONNECT_SECONDS: Final = 5.0
"""How long a host may take to answer."""


class UserError(Exception):
    """A user's mistake, found after the ranks have met; it is told without a traceback."""


class DriftError(Exception):
    """Ranks hold different copies of a tensor; every rank raises it, and it is told in one line."""


@dataclass(frozen=True)
class Rendezvous:
    """One rank's view of the job.

    Attributes:
        store: keys and values that all ranks share.
        rank: rank of this process.
        size: number of ranks of the job.
        connect: makes another connection to the store; ``None``: all threads share ``store``.
    """

    store: dist.Store
    rank: int
    size: int
    connect: Callable[[], dist.Store] | None = None

    def reconnected(self) -> "Rendezvous":
        """Return a rendezvous for another thread: a thread that waits blocks its connection."""
        return self if self.connect is None else replace(self, store=self.connect())

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

        Rank 0 returns last, because it may host the store and may end right after this call. That
        costs a job of n ranks 2 n + 1 operations of the store.
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

    The name of a host may stay unknown for up to ``seconds``.

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
    timeout = timedelta(minutes=config.devices.distributed_timeout_minutes)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        word = meet(store, rank, size, timeout.total_seconds())
    except dist.DistError as error:
        raise ValueError(
            f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}: the "
            f"{size} ranks cannot meet there ({str(error).splitlines()[0]}): start all of them, "
            "rank 0 on that host, choose a port that is free there and open to the others, and "
            "raise --distributed-timeout-minutes if they start long after one another"
        ) from error

    def connect() -> dist.Store:
        client = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timeout,
        )
        return dist.PrefixStore(word, client)

    return Rendezvous(dist.PrefixStore(word, store), rank, size, connect)


def is_in_reach() -> bool:
    """Return whether a process listens at the address where the ranks have met."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(place, CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def meet(store: dist.Store, rank: int, size: int, seconds: float) -> str:
    """Wait for all ranks of this launch; return a word that these ranks share, and no others.

    Every rank announces itself with a new word of its own, and rank 0 answers to that word. A rank
    that is started anew announces another word, so rank 0 looks again until all ranks have heard
    its answer. That costs a job of n ranks 6 (n - 1) operations of the store if no earlier process
    has left a word there.

    The store may hold keys of earlier launches.

    Raises:
        ValueError: some ranks have not come in time.
    """
    patience = _Patience(store, seconds)
    if rank > 0:
        own = secrets.token_hex(8)
        store.set(f"here {rank}", own)
        patience.wait({0: f"answer to {own}"})
        word = store.get(f"answer to {own}").decode()
        store.set(f"{word} heard by {rank}", "")
        return word
    word = f"launch {secrets.token_hex(8)}"
    answered: dict[int, bytes] = {}
    missing = {other: f"{word} heard by {other}" for other in range(1, size)}
    patience.wait({other: f"here {other}" for other in missing})
    while missing:
        for other in missing:
            own_word = store.get(f"here {other}")
            if answered.get(other) != own_word:
                answered[other] = own_word
                store.set(f"answer to {own_word.decode()}", word)
        if patience.comes(missing.values(), LOOK_SECONDS):
            break
        missing = {other: key for other, key in missing.items() if not store.check([key])}
        patience.tell(missing)
    return word


class _Patience:
    """Waits for keys of the store, and says which ranks are late."""

    def __init__(self, store: dist.Store, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._begin = self._told = time.monotonic()

    def wait(self, keys: Mapping[int, str]) -> None:
        """Wait for the keys of some ranks.

        Raises:
            ValueError: the keys have not come in time.
        """
        while not self.comes(keys.values(), TELL_SECONDS):
            self.tell(rank for rank, key in keys.items() if not self._store.check([key]))

    def tell(self, late: Iterable[int]) -> None:
        """Say now and then which ranks are late.

        Raises:
            ValueError: the time is over.
        """
        late, now = list(late), time.monotonic()
        if late and now > self._begin + self._seconds:
            raise ValueError(
                f"{ranks_in_words(late)} did not come within {self._seconds / 60:g} minutes "
                "(--distributed-timeout-minutes): look at what they print, or raise it"
            )
        if late and now > self._told + TELL_SECONDS:
            self._told = now
            _LOG.info("waiting for %s for %.0f s", ranks_in_words(late), now - self._begin)

    def comes(self, keys: Collection[str], seconds: float) -> bool:
        """Return whether all ``keys`` are there, now or within ``seconds``."""
        left = self._begin + self._seconds - time.monotonic()
        return come(self._store, keys, min(seconds, left))


def come(store: dist.Store, keys: Collection[str], seconds: float) -> bool:
    """Return whether all ``keys`` are in ``store``, now or within ``seconds``.

    The function looks again and again, because the store's own ``wait`` prints a warning of three
    lines when its time is over. The pauses grow, as thousands of ranks may look at the same time.
    """
    pause, end = FIRST_PAUSE, time.monotonic() + seconds
    while not store.check(list(keys)):
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, LAST_PAUSE)
    return True
