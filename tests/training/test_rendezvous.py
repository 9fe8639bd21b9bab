"""What the ranks' meeting costs the one store that serves them all, up to thousands of ranks."""

import socket
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.training.agreement import check_agreement
from megatron.training.rendezvous import Rendezvous, UserError, check_meeting_place, join


class CountingStore(dist.Store):
    """A store for threads that notes every key of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self._values: dict[str, bytes] = {}
        self._is_set: dict[str, threading.Event] = defaultdict(threading.Event)
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._note("set", key)
        self._values[key] = value.encode()
        self._is_set[key].set()

    def get(self, key: str) -> bytes:
        self._note("get", key)
        assert self._is_set[key].wait(60), f"nobody set {key!r}"
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        self._note("add", key)
        with self._lock:
            self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + amount)
            return int(self._values[key])

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        for key in keys:
            self._note("wait", key)
            assert self._is_set[key].wait(timeout.total_seconds()), f"nobody set {key!r}"

    def _note(self, what: str, key: str) -> None:
        with self._lock:
            self._is_set[key]  # made under the lock
            self.operations[what] += 1


def budget(ranks: int) -> int:
    """Each rank but the first tells, hears and says that it heard, and is read once."""
    return 4 * ranks


def test_starting_4096_ranks_costs_some_operations_of_each() -> None:
    """Ranks take turns; only rank 0, which waits for the last, has a thread of its own."""
    n, store = 4096, CountingStore()
    ranks = [Rendezvous(store, rank, n) for rank in range(n)]

    def first() -> tuple[list[str] | None, str]:
        return ranks[0].gather("0"), ranks[0].broadcast("the word")

    with ThreadPoolExecutor(1) as thread:
        of_first = thread.submit(first)
        assert {rank.gather(str(rank.rank)) for rank in ranks[1:]} == {None}
        assert {rank.broadcast(None) for rank in ranks[1:]} == {"the word"}
        assert of_first.result() == ([str(rank) for rank in range(n)], "the word")
    assert store.operations.total() <= budget(n), store.operations


@pytest.mark.parametrize("n", [1, 2, 3, 32])
@pytest.mark.parametrize("odd", [(), (1,), (0,), (5, 30)], ids=str)
def test_agreeing_costs_no_more_and_tells_who_differs_in_what(n: int, odd: tuple[int, ...]) -> None:
    store, odd = CountingStore(), tuple(rank for rank in odd if rank < n)
    digests = [{"train.seed": "other" if rank in odd else "same", "plan": "p"} for rank in range(n)]

    def verdict(rank: int) -> str:
        try:
            check_agreement(Rendezvous(store, rank, n), digests[rank])
        except UserError as error:
            return str(error)
        return "agreed"

    with ThreadPoolExecutor(n) as threads:
        verdicts = set(threads.map(verdict, range(n)))
    assert store.operations.total() <= budget(n), store.operations
    assert len(verdicts) == 1
    differing = [rank for rank in range(n) if digests[rank] != digests[0]]
    if differing:
        names = ", ".join(map(str, differing))
        assert verdicts.pop().startswith(f"train.seed of rank {names} differ from rank 0's")
    else:
        assert verdicts == {"agreed"}


def test_the_first_rank_leaves_only_after_all_have_heard() -> None:
    """It may host the store."""
    store = CountingStore()
    ranks = [Rendezvous(store, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(1) as thread:
        leaving = thread.submit(ranks[0].broadcast, "the word")
        ranks[1].broadcast(None)
        assert not leaving.done()
        ranks[2].broadcast(None)
        leaving.result(timeout=60)


def test_a_single_rank_needs_no_store() -> None:
    store = CountingStore()
    alone = Rendezvous(store, 0, 1)
    assert (alone.gather("own"), alone.broadcast("own")) == (["own"], "own")
    assert not store.operations


@pytest.fixture
def of_two(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of rank 0 of two."""
    port = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **port}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_host_that_is_known_is_met(of_two: pytest.MonkeyPatch) -> None:
    check_meeting_place(2)


def test_one_rank_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no host at all")
    check_meeting_place(1)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a b", "x" * 300, "\u00e9" * 300])
def test_a_host_that_nobody_knows_is_named(host: str, of_two: pytest.MonkeyPatch) -> None:
    of_two.setenv("MASTER_ADDR", host)
    with pytest.raises(
        ValueError, match=r"MASTER_ADDR=.* is no host that this machine knows .*set"
    ):
        check_meeting_place(2, seconds=0)


def test_a_host_may_become_known_a_little_later(of_two: pytest.MonkeyPatch) -> None:
    asked = []

    def late(host: str, port: str) -> None:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    of_two.setattr(socket, "getaddrinfo", late)
    of_two.setattr(time, "sleep", lambda _: None)
    check_meeting_place(2)
    assert asked == ["localhost"] * 3


def test_what_is_missing_to_meet_is_told_at_once(of_two: pytest.MonkeyPatch) -> None:
    of_two.delenv("MASTER_ADDR")
    of_two.setenv("MASTER_PORT", "")
    with pytest.raises(ValueError, match=r"^MASTER_ADDR is not set.*\nMASTER_PORT is not set"):
        check_meeting_place(2)


def test_a_port_that_is_taken_is_named(of_two: pytest.MonkeyPatch) -> None:
    run = Job(GPTOptions(num_layers=2), iterations=1)
    config = run.config(Layout(2, "none"), torch.float32).parallel
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        of_two.setenv("MASTER_PORT", str(port))
        with pytest.raises(
            ValueError, match=rf"^MASTER_ADDR=localhost MASTER_PORT={port}: the 2 ra"
        ):
            join(config)
