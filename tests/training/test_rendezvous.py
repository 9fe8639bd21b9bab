"""What the ranks' meeting costs the one store that serves them all, up to thousands of ranks."""

import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.training.agreement import check_agreement
from megatron.training.rendezvous import Rendezvous, UserError


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
