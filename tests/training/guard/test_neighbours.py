"""A ring tells all ranks of a rank that has died, and one of them speaks; not of one that left.

Ranks are threads with sockets of their own; a rank dies by closing its sockets, as the operating
system does for a process.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from megatron.training.guard import neighbours
from megatron.training.guard.neighbours import Neighbours, News
from megatron.training.rendezvous import Rendezvous

SECONDS = 30.0


class EndedError(Exception):
    """A rank has ended."""


class Ring:
    """Ranks that are threads, and how each of them ended."""

    def __init__(self, size: int) -> None:
        store = dist.HashStore()
        self.ranks = [
            Neighbours(Rendezvous(store, rank, size, connect=lambda: store)) for rank in range(size)
        ]
        self.ended: dict[int, object] = {}
        for own in self.ranks:
            own.join()
        self.wait(lambda: all(len(own._links) == 2 for own in self.ranks))
        self.wait(lambda: all(link.rank is not None for own in self.ranks for link in own._links))

    def wait(self, until: Any) -> None:
        end = time.monotonic() + SECONDS
        while not until():
            assert time.monotonic() < end, (self.ended, [own.news for own in self.ranks])
            time.sleep(0.01)

    def dies(self, rank: int) -> None:
        vars(self.ranks[rank])["_hear"] = lambda news, source: None
        for link in list(self.ranks[rank]._links):
            link.socket.shutdown(socket.SHUT_RDWR)

    def ends(self, *ranks: int) -> list[object]:
        """How ranks ended, once all have."""
        self.wait(lambda: all(rank in self.ended for rank in ranks))
        return [self.ended[rank] for rank in ranks]


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Ring:
    """A ring of so many ranks; the threads of ranks that end only say so."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(neighbours, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(neighbours, "SECOND_SPEAKER_SECONDS", 1.0)
    monkeypatch.setattr(neighbours, "TOLD_SECONDS", 1.0)
    of_thread = threading.local()

    def end(how: object) -> NoReturn:
        made.ended[of_thread.rank] = how
        raise EndedError

    def noted(own_end: Callable[[Neighbours], None]) -> Callable[[Neighbours], None]:
        def end_of(self: Neighbours) -> None:
            of_thread.rank = self.rendezvous.rank
            with suppress(EndedError):
                own_end(self)

        return end_of

    monkeypatch.setattr(neighbours, "end_with_reason", end)
    monkeypatch.setattr(neighbours, "end_silently", end)
    monkeypatch.setattr(Neighbours, "_end", noted(Neighbours._end))
    monkeypatch.setattr(Neighbours, "_end_as_told", noted(Neighbours._end_as_told))
    made = Ring(request.param)
    return made


@pytest.mark.parametrize(
    ("ring", "dead", "speaker"),
    [(2, 0, 1), (2, 1, 0), (4, 0, 1), (4, 2, 3), (5, 4, 0)],
    indirect=["ring"],
)
def test_the_rank_after_a_dead_one_names_it_and_all_others_end(
    ring: Ring, dead: int, speaker: int
) -> None:
    ring.dies(dead)
    others = [rank for rank in range(len(ring.ranks)) if rank not in (dead, speaker)]
    assert str(ring.ends(speaker)[0]).startswith(f"error: rank {dead} was lost: ")
    assert ring.ends(*others) == [1] * len(others)


@pytest.mark.parametrize("ring", [5], indirect=True)
def test_of_two_dead_ranks_in_a_row_the_last_is_named_at_least(ring: Ring) -> None:
    """Rank 3 follows the dead rank 2; rank 0 is before the dead rank 1, and follows nobody dead."""
    ring.dies(1)
    ring.dies(2)
    silent, speaker, other = ring.ends(0, 3, 4)
    assert (silent, other) == (1, 1)
    assert "2" in str(speaker).split(" lost: ")[0], speaker


@pytest.mark.parametrize("ring", [4], indirect=True)
def test_the_rank_before_speaks_if_the_rank_after_is_silent(ring: Ring) -> None:
    vars(ring.ranks[2])["_hear"] = lambda news, source: None
    ring.dies(1)
    assert str(ring.ends(0)[0]).startswith("error: rank 1 was lost: ")


@pytest.mark.parametrize("ring", [4], indirect=True)
def test_a_rank_that_left_in_good_order_is_not_missed(ring: Ring) -> None:
    ring.ranks[2].take_leave("left")
    ring.wait(lambda: all(2 in ring.ranks[rank].news for rank in (1, 3)))
    ring.dies(2)
    time.sleep(1.5)
    assert not ring.ended
    assert all(own.lost is None for own in ring.ranks)
    ring.dies(0)  # the ring is open at rank 2, and the news goes the other way
    assert str(ring.ends(1)[0]).startswith("error: rank 0 was lost: ")
    ring.ends(3)


@pytest.mark.parametrize("ring", [4], indirect=True)
def test_ranks_that_wait_for_a_rank_that_told_why_it_ends_end_in_silence(ring: Ring) -> None:
    """Their main threads do nothing, as in a collective; rank 1 hears two ranks tell."""
    ring.ranks[2].take_leave("told")
    ring.wait(lambda: all(ring.ranks[rank].another_told for rank in (0, 1, 3)))
    ring.dies(2)
    time.sleep(0.3)
    assert not ring.ended, "ranks with the same fault have time to end by themselves"
    ring.ranks[0].take_leave("told")
    ring.wait(lambda: len(ring.ranks[1].news) == 2)
    assert ring.ends(0, 1, 3) == [1, 1, 1]
    assert all(own.lost is None for own in ring.ranks)


@pytest.mark.parametrize("ring", [3], indirect=True)
def test_a_rank_that_is_told_why_waits_for_its_own_save(ring: Ring) -> None:
    saving = threading.Event()
    saving.set()
    ring.ranks[0].ends_a_save = saving.is_set
    ring.ranks[2].take_leave("told")
    assert ring.ends(1) == [1]
    time.sleep(0.7)
    assert 0 not in ring.ended
    saving.clear()
    assert ring.ends(0) == [1]


BLOCKED = """
import sys, time
import torch.distributed as dist
from megatron.training.guard import neighbours
from megatron.training.rendezvous import Rendezvous

neighbours.TOLD_SECONDS = 1.0
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("localhost", port, 2, rank == 0)
dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=2)
connect = lambda: dist.TCPStore("localhost", port, 2, False)
own = neighbours.Neighbours(Rendezvous(store, rank, 2, connect))
own.join()
while len([link for link in own._links if link.rank is not None]) < 2:
    time.sleep(0.01)
if rank == 0:
    dist.barrier()
time.sleep(0.5)  # rank 0 comes to its barrier
own.take_leave("told")
time.sleep(3600.0)
"""
"""Rank 0 waits for rank 1 in a collective, and rank 1, which never joins, tells why it ends."""


def test_a_process_that_waits_in_a_collective_for_one_that_told_ends() -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    jobs = [
        subprocess.Popen([sys.executable, "-c", BLOCKED, str(rank), str(port)], env=environment)
        for rank in (0, 1)
    ]
    try:
        assert jobs[0].wait(2 * SECONDS) == 1
    finally:
        for job in jobs:
            job.kill()
            job.wait()


@pytest.mark.parametrize("ring", [4], indirect=True)
def test_all_know_when_the_host_of_the_store_has_left(ring: Ring) -> None:
    ring.ranks[0].take_leave("left")
    ring.wait(lambda: all(own.store_has_ended for own in ring.ranks[1:]))
    assert not ring.ended


@pytest.mark.parametrize("ring", [2], indirect=True)
@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\n", b'{"word": "x", "rank": 1}\n', b"[1\n", b"x" * 9000]
)
def test_strangers_are_turned_away(ring: Ring, sent: bytes) -> None:
    own = ring.ranks[1]
    [listener] = [key.fileobj for key in own._selector.get_map().values() if key.data is None]
    assert isinstance(listener, socket.socket)
    with socket.create_connection(("localhost", listener.getsockname()[1])) as stranger:
        stranger.sendall(sent)
        stranger.settimeout(SECONDS)
        with suppress(ConnectionError):  # closed before all was read
            assert stranger.recv(1) == b""
    ring.wait(lambda: len(own._links) == 2)
    assert not ring.ended
    assert not own.news


def test_under_torchrun_and_alone_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    Neighbours(Rendezvous(store, 0, 1, connect=lambda: store)).join()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    Neighbours(Rendezvous(store, 0, 2, connect=lambda: store)).join()
    assert store.num_keys() == 0


@pytest.mark.parametrize("order", [(1, 3), (3, 1)])
def test_the_sight_of_the_rank_after_counts_whenever_it_comes(order: tuple[int, int]) -> None:
    """Ranks 1 and 3 both see that rank 0 of four dies; rank 1 may hear of it before it sees it."""
    own = Neighbours(Rendezvous(dist.HashStore(), 1, 4))
    own._is_ending = True  # so that nothing ends here
    with socket.socket() as any_socket:
        link = neighbours._Link(any_socket)
        for by in order:
            own._hear(News("lost", 0, by), link)
        own._hear(News("left", 2, 2), link)
        own._hear(News("lost", 2, 3), link)
    assert own._speakers() == {1}
    assert own.lost == 0
    assert own.news[2].event == "left"
