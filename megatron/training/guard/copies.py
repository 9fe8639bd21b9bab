"""Checks that ranks which must hold equal tensors do, before a save and now and then.

Replicas that have drifted apart train on: each sees its own weights, and the loss falls. A
checkpoint would mix them. So every rank sends the checksums of all its tensors to all ranks (16
bytes a tensor), and every rank compares them: tensors with the same boxes must have the same bits.

A sharded optimizer (ZeRO) leaves another fault without a trace in copies: all replicas gather the
same shards, also the shard of a rank whose optimizer does nothing. Such a rank knows that it had a
gradient and that the step was taken; then a tensor of its optimizer must have changed.

**How often.** Unless the user gives a number of iterations, checks between saves cost at most
``SHARE`` of the time. The checks before saves, and the reading of the optimizer's state before the
first iteration, come on top. The first estimate comes from the bytes of the tensors, the later ones
from the last check: all ranks take the seconds of the slowest rank, divide them by the share and by
the seconds of an iteration, and check again after so many iterations.
"""

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from torch import Tensor

from megatron.parallel.groups import ConnectedAxis
from megatron.training.guard.held import Held, checksums, held_by
from megatron.training.rendezvous import DriftError
from megatron.training.setup import TrainState
from megatron.training.step import Finished
from megatron.training.words import ranks_in_words

SHARE: Final = 0.001
"""The share of the time that checks may cost."""

ESTIMATED_AFTER: Final = 10
"""Iterations of a launch after which the seconds of an iteration count as known."""

BYTES_PER_SECOND: Final[Mapping[str, float]] = {"cpu": 1e9, "cuda": 2e11}
"""A low estimate of the bytes that a device checks in a second, by type. One core of 2020 checks 3
GB in a second; a GPU that moves 2 TB a second moves 7 bytes for each, and checks 0.28 TB."""

SECONDS_OF_TENSOR: Final = 4e-4
"""An estimate of the time that a tensor takes besides its bytes: 40 launches of 10 us."""


class Report(NamedTuple):
    """What a rank tells the others.

    Attributes:
        keys: of its tensors, int64.
        values: their checksums, int64.
        stands_still: whether its optimizer has changed nothing though it should have.
        seconds: of this check until the rank reports, and of the exchange of the check before.
        of_iteration: seconds of its iterations, on average.
    """

    keys: np.ndarray
    values: np.ndarray
    stands_still: bool
    seconds: float
    of_iteration: float


@dataclass(frozen=True)
class Differing:
    """A tensor of which some ranks hold other bits than most.

    Attributes:
        key: of the tensor.
        ranks: the ranks with other bits than ``alike``, at least one.
        alike: the most ranks that hold the same bits; of two such sets, the one with the lowest
            rank.
    """

    key: int
    ranks: tuple[int, ...]
    alike: tuple[int, ...]


def differing(reports: Sequence[Report]) -> list[Differing]:
    """Return the tensors of which ranks hold different copies, by their reports, in rank order."""
    keys = np.concatenate([report.keys for report in reports])
    values = np.concatenate([report.values for report in reports])
    ranks = np.repeat(np.arange(len(reports)), [len(report.keys) for report in reports])
    order = np.argsort(keys, kind="stable")
    keys, values, ranks = keys[order], values[order], ranks[order]
    if not len(keys):
        return []
    firsts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    unequal = np.minimum.reduceat(values, firsts) != np.maximum.reduceat(values, firsts)
    ends = np.r_[firsts[1:], len(keys)]
    return [
        _differing(int(keys[first]), values[first:end].tolist(), ranks[first:end].tolist())
        for first, end in zip(firsts[unequal], ends[unequal], strict=True)
    ]


def _differing(key: int, values: Sequence[int], ranks: Sequence[int]) -> Differing:
    holders: dict[int, list[int]] = defaultdict(list)
    for value, rank in zip(values, ranks, strict=True):
        holders[value].append(rank)
    alike = max(holders.values(), key=lambda own: (len(own), -own[0]))
    return Differing(key, tuple(rank for rank in ranks if rank not in alike), tuple(alike))


class Copies:
    """Compares this rank's tensors with the other ranks'; all ranks call the same methods.

    Args:
        state: this rank.
        interval: iterations from one check to the next; 0: never check, also not before a save;
            ``None``: so often that it costs ``SHARE`` of the time.
    """

    def __init__(self, state: TrainState, interval: int | None) -> None:
        self._state, self._interval = state, interval
        self._hosts: ConnectedAxis = state.groups.world_hosts
        self._keys: dict[str, int] = {}
        self._moments: dict[int, int] = {}
        self._stepped = False
        self._next: int | None = None
        self._first = self._checked = 0
        self._begin = self._exchange = 0.0

    @property
    def is_used(self) -> bool:
        """Whether anything is ever checked."""
        return self._interval != 0

    def begin(self, iteration: int) -> None:
        """Note the optimizer's state before the first iteration, counted from 0."""
        if self.is_used:
            moments = [own for own in held_by(self._state) if own.is_moment]
            self._moments = dict(zip(map(self._key, moments), checksums(moments), strict=True))
        self._first, self._begin = iteration, time.perf_counter()

    def note(self, finished: Finished | None) -> None:
        """Note whether an iteration that has become final has taken a step."""
        if finished is not None:
            self._stepped |= not finished.is_skipped and finished.grad_norm > 0

    def is_due(self, iteration: int) -> bool:
        """Return whether to check after ``iteration``, counted from 0."""
        done = iteration + 1
        if self._interval is not None:
            return self._interval > 0 and done % self._interval == 0
        if self._next is None and done == self._first + ESTIMATED_AFTER:
            own = (self._estimate(), self._seconds_of_iteration(done))
            self._plan(done, self._hosts.all_gather_object(own))
        return done == self._next

    def check(self, iteration: int) -> None:
        """Compare all copies after ``iteration``, counted from 0; the step must be settled.

        Raises:
            DriftError: on every rank; copies differ, or a rank's optimizer stands still.
        """
        begin, done = time.perf_counter(), iteration + 1
        if not self.is_used or self._checked == done:
            return
        of_iteration = self._seconds_of_iteration(done)
        held = list(held_by(self._state))
        keys, values = list(map(self._key, held)), checksums(held)
        moments = {k: v for k, v, own in zip(keys, values, held, strict=True) if own.is_moment}
        own_report = Report(
            np.array(keys, dtype=np.int64),
            np.array(values, dtype=np.int64),
            self._stands_still(moments),
            (reports_at := time.perf_counter()) - begin + self._exchange,
            of_iteration,
        )
        self._moments, self._stepped, self._checked = moments, False, done
        reports = self._hosts.all_gather_object(own_report)
        self._refuse(iteration, held, keys, reports)
        self._exchange = time.perf_counter() - reports_at
        self._plan(done, [(report.seconds, report.of_iteration) for report in reports])

    def _stands_still(self, moments: Mapping[int, int]) -> bool:
        """Return whether the optimizer's state is as at the last check, though it has had work.

        A rank without a gradient of its own in the last iteration proves nothing.
        """
        sums = self._state.own_sums.latest
        if not self._stepped or not moments or sums is None or moments != self._moments:
            return False
        return float(sums[1]) > 0

    def _refuse(
        self, iteration: int, held: Sequence[Held], keys: Sequence[int], reports: Sequence[Report]
    ) -> None:
        """End the job if ranks differ; every rank has the same reports."""
        found = differing(reports)
        still = [rank for rank, report in enumerate(reports) if report.stands_still]
        if not found and not still:
            return
        wanted = {own.key for own in found}
        names = {k: str(own) for k, own in zip(keys, held, strict=True) if k in wanted}
        by_key: dict[int, str] = {}
        for own in self._hosts.all_gather_object(names):
            by_key |= own
        what = told(found, by_key) if found else told_still(still)
        raise DriftError(
            f"iteration {iteration + 1}: {what}. Training ends, and nothing is saved. Look at that "
            "rank's machine and code, and go on from the last checkpoint (--load); "
            "--check-weight-hash-across-dp-replicas-interval 0 trains without this check"
        )

    def _key(self, held: Held) -> int:
        """Return the key of a tensor, which never changes."""
        name = f"{held.kind} {held.name}"
        if name not in self._keys:
            self._keys[name] = held.key
        return self._keys[name]

    def _estimate(self) -> float:
        """Return an estimate of the seconds of a check; the host may hold some of the tensors."""
        return sum(
            own.tensor.numel() * own.tensor.element_size() / _rate(own.tensor) + SECONDS_OF_TENSOR
            for own in held_by(self._state)
        )

    def _seconds_of_iteration(self, done: int) -> float:
        return (time.perf_counter() - self._begin) / max(1, done - self._first)

    def _plan(self, done: int, by_rank: Sequence[tuple[float, float]]) -> None:
        """Decide when to check next, from the seconds of a check and of an iteration on ranks."""
        self._next = done + iterations_apart(by_rank)


def _rate(tensor: Tensor) -> float:
    """Return the bytes of a tensor that its device checks in a second, by a low estimate."""
    return BYTES_PER_SECOND.get(tensor.device.type, BYTES_PER_SECOND["cpu"])


def iterations_apart(by_rank: Sequence[tuple[float, float]]) -> int:
    """Return how many iterations lie between checks that cost ``SHARE`` of the time.

    Args:
        by_rank: seconds of a check and of an iteration, for every rank.
    """
    check = max(seconds for seconds, _ in by_rank)
    iteration = min(seconds for _, seconds in by_rank)
    return max(1, math.ceil(check / (SHARE * max(iteration, 1e-9))))


def told(found: Sequence[Differing], names: Mapping[int, str]) -> str:
    """Return a message on different copies that names the first rank that differs."""
    rank = min(rank for own in found for rank in own.ranks)
    of_rank = sorted((own for own in found if rank in own.ranks), key=lambda own: names[own.key])
    first, more = of_rank[0], len(of_rank) - 1
    others = sorted({rank for own in found for rank in own.ranks} - {rank})
    tensors = f"{names[first.key]}" + (f" and {more} other tensors" if more else "")
    also = f"; {ranks_in_words(others)} differ{'s' * (len(others) == 1)} too" if others else ""
    return (
        f"rank {rank} holds another copy of {tensors} than {ranks_in_words(first.alike)}, and "
        f"these copies must be equal to the last bit{also}"
    )


def told_still(ranks: Sequence[int]) -> str:
    """Return a message on ranks whose optimizers do nothing."""
    return (
        f"the optimizer of {ranks_in_words(ranks)} has changed none of its tensors since the last "
        "check, though steps were taken and there was a gradient"
    )
