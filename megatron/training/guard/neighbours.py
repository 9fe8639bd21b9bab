"""A ring of connections between ranks, over which the death of a rank is known at once.

Without torchrun nobody watches the ranks, and the store of the job ends with rank 0. So every rank
keeps a connection to the next rank and one to the rank before, on which nothing is said while all
is well. When a process ends, for whatever reason, its operating system closes its connections, and
both neighbours know. They pass the word on in both directions, and every rank ends; the rank after
the lost one says which rank was lost. A machine that is out of reach stops to answer the probes of
TCP, which takes ``PROBES`` probes.

A rank that ends in good order, or has said itself why it ends, takes leave first. If it has said
why, the other ranks end too: at once by themselves, if they have found the same fault, and
otherwise after ``TOLD_SECONDS``, as their main threads may wait for that rank.
"""

import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, get_args

import torch.distributed as dist

from megatron.training.failure import GRACE_SECONDS, SILENT_SECONDS, end_silently, end_with_reason
from megatron.training.rendezvous import Rendezvous, come
from megatron.training.words import ranks_in_words

_LOG = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 2.0
"""How long a neighbour may take to accept a connection at one of its addresses, or to greet."""

SECOND_SPEAKER_SECONDS: Final = 4.0
"""How long the rank before a lost one waits for the rank after it to speak; it may be lost too."""

PROBE_SECONDS, PROBES = 5, 24
"""Seconds between two probes of a silent connection, and probes without an answer that end it: a
network for sockets may be away for a minute while the links between GPUs go on."""

TOLD_SECONDS: Final = SILENT_SECONDS + 2 * GRACE_SECONDS
"""How long a rank that hears why the job ends has to end by itself. A rank that has found the same
fault ends after ``SILENT_SECONDS``, with its own status."""

MEET_SECONDS: Final = 60.0
"""How long a rank may take to publish its address."""

MESSAGE_BYTES: Final = 4096
"""The longest message."""

Event = Literal["lost", "told", "left"]
"""What has become of a rank: lost, or left after it told the reason, or left in good order."""


class News(NamedTuple):
    """What has become of a rank, as neighbours pass it on.

    Attributes:
        event: see ``Event``.
        rank: the rank.
        by: the rank that has seen it.
    """

    event: Event
    rank: int
    by: int


@dataclass
class _Link:
    """A connection; ``rank`` is the neighbour once it has greeted, and ``read`` an open message."""

    socket: socket.socket
    rank: int | None = None
    read: bytes = b""


@dataclass
class Neighbours:
    """The ring of one rank; a thread of its own listens.

    Attributes:
        rendezvous: where the ranks have met.
        news: what has become of other ranks, by rank; several threads may read it.
        ends_a_save: tells whether this rank waits for the end of a save before it ends by itself.
    """

    rendezvous: Rendezvous
    news: dict[int, News] = field(default_factory=dict)
    ends_a_save: Callable[[], bool] = lambda: False
    _links: list[_Link] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _word: str = ""
    _is_ending: bool = False
    _is_told: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def lost(self) -> int | None:
        """The first rank known to be dead, which ends the job, if there is one."""
        return next((one.rank for one in self._all_lost()), None)

    @property
    def is_linked(self) -> bool:
        """Whether a neighbour is connected."""
        return any(link.rank is not None for link in self._links)

    @property
    def store_has_ended(self) -> bool:
        """Whether rank 0, which hosts the store, has ended."""
        return 0 in self.news

    @property
    def another_told(self) -> bool:
        """Whether another rank has said why the job ends."""
        return any(one.event == "told" for one in list(self.news.values()))

    def join(self) -> None:
        """Publish this rank's address and connect to the next rank, in a thread of its own.

        torchrun watches its ranks itself, so under torchrun nothing is done.
        """
        rendezvous = self.rendezvous
        if rendezvous.size == 1 or rendezvous.connect is None or dist.is_torchelastic_launched():
            return
        self._word = secrets.token_hex(8)
        try:
            listener = _listener()
            here = {"at": _addresses(), "port": listener.getsockname()[1], "word": self._word}
        except OSError as error:
            _LOG.info("the ranks beside this one are not watched: %s", error)
            return
        self._selector.register(listener, selectors.EVENT_READ, None)
        rendezvous.store.set(f"neighbour {rendezvous.rank}", json.dumps(here))
        for work in (self._listen, self._call_next):
            threading.Thread(target=work, name="neighbours", daemon=True).start()

    def take_leave(self, event: Event) -> None:
        """Tell both neighbours that this rank is about to end; any thread may call it."""
        rank = self.rendezvous.rank
        self._send(News(event, rank, rank), self._links)

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select(1.0):
                if key.data is None:
                    self._accept(key.fileobj)
                else:
                    self._read(key.data)

    def _call_next(self) -> None:
        """Connect to the next rank at the first of its addresses that greets."""
        following = (self.rendezvous.rank + 1) % self.rendezvous.size
        try:
            store, key = self.rendezvous.reconnected().store, f"neighbour {following}"
            there = json.loads(store.get(key)) if come(store, [key], MEET_SECONDS) else {"at": []}
        except dist.DistError:  # the store has ended, and rank 0 with it
            return
        for host in there["at"]:
            with suppress(OSError):
                self._add(self._greeted((host, there["port"]), there["word"]), following)
                return
        _LOG.info("rank %d is not watched: it cannot be reached at %s", following, there["at"])

    def _greeted(self, place: tuple[str, int], word: str) -> socket.socket:
        """Return a connection to the next rank, which has answered with its word."""
        made = socket.create_connection(place, CONNECT_SECONDS)
        try:
            made.sendall(json.dumps({"word": word, "rank": self.rendezvous.rank}).encode() + b"\n")
            if made.recv(len(word), socket.MSG_WAITALL) != word[::-1].encode():
                raise OSError("another process listens there")
        except OSError:
            made.close()
            raise
        return made

    def _accept(self, listener: object) -> None:
        assert isinstance(listener, socket.socket), "only the listener has no link"
        with suppress(OSError):
            self._add(listener.accept()[0], None)

    def _add(self, made: socket.socket, rank: int | None) -> None:
        made.setblocking(False)
        _probe(made)
        link = _Link(made, rank)
        with self._lock:
            self._links.append(link)
        self._selector.register(made, selectors.EVENT_READ, link)

    def _read(self, link: _Link) -> None:
        """Read from a link; a link that has ended says that its neighbour has, unless it left."""
        try:
            data = link.socket.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(link)
            if link.rank is not None:
                self._hear(News("lost", link.rank, self.rendezvous.rank), link)
            return
        *lines, link.read = (link.read + data).split(b"\n")
        for line in lines:
            if not self._understand(link, line):
                self._drop(link)
                return
        if len(link.read) > MESSAGE_BYTES:
            self._drop(link)

    def _understand(self, link: _Link, line: bytes) -> bool:
        """Do as a line says; return whether it is of this job."""
        try:
            said = json.loads(line)
            if link.rank is None:
                if said["word"] != self._word:
                    return False
                link.rank = int(said["rank"])
                link.socket.send(self._word[::-1].encode())  # nothing is behind it yet
                return True
            news = News(*said)
            if news.event in get_args(Event):
                self._hear(news, link)
        except (ValueError, TypeError, KeyError, OSError):
            return False
        return True

    def _hear(self, news: News, source: _Link) -> None:
        """Note news, pass them on, and end this rank if another one is lost or told why it ends.

        Both neighbours of a lost rank tell of it. The word of the rank after it counts more, so
        that one rank speaks.
        """
        known, size = self.news.get(news.rank), self.rendezvous.size
        better = known is not None and known.event == "lost" and known.by != news.by
        better &= news.by == (news.rank + 1) % size
        if news.rank == self.rendezvous.rank or (known is not None and not better):
            return
        self.news[news.rank] = news
        # That a rank has left in good order matters to others only if it hosts the store.
        if news.event != "left" or news.rank == 0:
            self._send(news, [link for link in self._links if link is not source])
        if news.event == "lost" and not self._is_ending:
            self._is_ending = True
            threading.Thread(target=self._end, name="end", daemon=True).start()
        elif news.event == "told" and not self._is_told:
            self._is_told = True
            threading.Thread(target=self._end_as_told, name="end as told", daemon=True).start()

    def _end_as_told(self) -> None:
        """End this process unless it ends by itself; the reason is on the screen already."""
        end = time.monotonic() + TOLD_SECONDS
        while time.monotonic() < end:
            time.sleep(TOLD_SECONDS / 50)
            if self.ends_a_save():
                end = time.monotonic() + TOLD_SECONDS
        self.take_leave("left")
        end_silently(1)

    def _end(self) -> None:
        """End this process. A signal to all ranks, such as Ctrl-C, has a moment to reach them."""
        rank = self.rendezvous.rank
        time.sleep(GRACE_SECONDS)
        if any(one.by == rank for one in self._all_lost()) and not self._speakers():
            time.sleep(SECOND_SPEAKER_SECONDS)
        speaks = (self._speakers() or {rank}) == {rank}
        self.take_leave("left")
        if not speaks or all(one.by != rank for one in self._all_lost()):
            end_silently(1)
        lost = ranks_in_words(one.rank for one in self._all_lost())
        end_with_reason(
            f"error: {lost} {'was' if lost.startswith('rank ') else 'were'} lost: the process has "
            f"ended, or its machine is out of reach (rank {rank} lost the connection to it); look "
            f"at the last words of {lost}"
        )

    def _all_lost(self) -> list[News]:
        return [one for one in list(self.news.values()) if one.event == "lost"]

    def _speakers(self) -> set[int]:
        """Return the ranks that follow a lost one and have seen it: the first of them speaks."""
        size, lost = self.rendezvous.size, self._all_lost()
        dead = {one.rank for one in lost}
        seen = {one.by for one in lost if one.by == (one.rank + 1) % size} - dead
        return {min(seen)} if seen else set()

    def _send(self, news: News, links: Iterable[_Link]) -> None:
        line = json.dumps(news).encode() + b"\n"
        with self._lock:
            for link in list(links):
                with suppress(OSError):  # a neighbour that has ended
                    link.socket.send(line)

    def _drop(self, link: _Link) -> None:
        with self._lock:
            self._links.remove(link)
        self._selector.unregister(link.socket)
        link.socket.close()


def _addresses() -> list[str]:
    """Return addresses at which other ranks may reach this machine, the likeliest first.

    The address on the way to rank 0 is right on every machine but rank 0's own, where it may be one
    that only this machine knows. Rank 0's machine has the name by which all found it.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(place)  # sends nothing
        own = str(way.getsockname()[0])
    found = [host, own] if own == place[0] or own.startswith("127.") else [own]
    with suppress(OSError):
        found += [str(at[4][0]) for at in socket.getaddrinfo(socket.gethostname(), None)]
    return list(dict.fromkeys(found))


def _listener() -> socket.socket:
    """Return a socket that listens on a free port of all addresses of this machine."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    made = socket.create_server(("", 0), family=family, backlog=16, dualstack_ipv6=both)
    made.setblocking(False)
    return made


def _probe(made: socket.socket) -> None:
    """Let the operating system end a connection whose other machine does not answer."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", PROBE_SECONDS),
        ("TCP_KEEPINTVL", PROBE_SECONDS),
        ("TCP_KEEPCNT", PROBES),
    ):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
