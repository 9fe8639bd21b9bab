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

from megatron.training import rendezvous as rendezvous_module
from megatron.training.agreement import check_agreement
from megatron.training.rendezvous import (
    Rendezvous,
    UserError,
    check_meeting_place,
    come,
    join,
    meet,
)


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

    def check(self, keys: list[str]) -> bool:
        self.operations["check"] += 1
        return all(key in self._values for key in keys)

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


def launch(store: dist.Store, size: int, ranks: range | None = None) -> list[str]:
    """Let ranks meet; return the word that each of them got."""
    wanted = range(size) if ranks is None else ranks
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: meet(store, rank, size, 60.0), wanted))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_launch_gets_a_word_of_its_own(size: int) -> None:
    """Torchrun keeps its store, with all keys, when it restarts a job."""
    store = dist.HashStore()
    words = [launch(store, size) for _ in range(3)]
    assert [len(set(own)) for own in words] == [1, 1, 1]
    assert len({own[0] for own in words}) == 3


@pytest.mark.parametrize("came", [range(2), range(1, 3)])
def test_a_launch_that_ended_before_all_had_come_leaves_no_trap(
    came: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some ranks of it are waiting for ever; those of the next launch do not hear them."""
    store = dist.HashStore()
    with pytest.raises(ValueError, match="did not come within"), ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: meet(store, rank, 3, 0.2), came))
    assert len(set(launch(store, 3))) == 1


def test_the_late_are_named_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous_module, "TELL_SECONDS", 0.05)
    caplog.set_level("INFO")
    store = dist.HashStore()
    store.set("here 1", "a word")
    late = r"ranks 2-3 did not come within 0.005 minutes \(--distributed-timeout-minutes\)"
    with pytest.raises(ValueError, match=late):
        meet(store, 0, 4, 0.3)
    assert caplog.messages
    assert all(message.startswith("waiting for ranks 2-3 for ") for message in caplog.messages)
    with pytest.raises(ValueError, match="rank 0 did not come"):
        meet(store, 1, 4, 0.1)


def test_meeting_costs_few_operations_of_each_rank() -> None:
    """The others have come when rank 0 looks, and hear its answer while it waits."""
    n, store = 64, CountingStore()
    assert len(set(launch(store, n))) == 1
    kept = {what: store.operations[what] for what in ("set", "get")}
    assert kept == {"set": 3 * (n - 1), "get": 2 * (n - 1)}


def test_come_tells_whether_all_keys_are_there() -> None:
    store = dist.HashStore()
    store.set("a", "")
    assert come(store, ["a"], 0.0)
    assert not come(store, ["a", "b"], 0.02)
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(come, store, ["a", "b"], 60.0)
        store.set("b", "")
        assert coming.result()


def test_another_connection_sees_the_same_keys() -> None:
    store = dist.HashStore()
    alone = Rendezvous(store, 0, 1)
    assert alone.reconnected() is alone
    connected = Rendezvous(store, 0, 1, lambda: store)
    assert connected.reconnected().store is store
    assert connected.reconnected() is not connected
