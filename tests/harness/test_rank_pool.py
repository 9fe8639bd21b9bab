"""The rank pool returns what ranks return, and turns everything that goes wrong into a failure."""

import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.marks import full
from harness.rank_pool import PRELOADED, RankError, RankPool


@pytest.fixture(scope="module")
def impatient() -> Iterator[RankPool]:
    """A pool that soon gives up on silence."""
    with RankPool(size=2, answer_timeout=5.0, grace=1.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def patient() -> Iterator[RankPool]:
    """A pool in which waiting for any timeout would outlast the test run."""
    with RankPool(size=2, answer_timeout=3600, collective_timeout=3600, grace=3600) as pool:
        yield pool


def gather_values(rank: int, world_size: int, *, offset: torch.Tensor) -> list[int]:
    """Return every rank's ``rank + offset``, as this rank received it."""
    values = [torch.zeros((), dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(values, offset + rank)
    return [int(value) for value in values]


def missing_modules(rank: int, world_size: int) -> list[str]:
    return [name for name in PRELOADED if name not in sys.modules]


FRESH = """
import sys
sys.path[:0] = sys.argv[1:]
from harness.rank_pool import RankPool
from harness.test_rank_pool import missing_modules
with RankPool(size=1) as pool:
    print(pool.run(missing_modules, 1))
"""


def test_a_rank_has_at_once_what_most_need() -> None:
    """A fork server passes over what it does not find, and then every rank imports it by itself.

    A process has one: here another test may have started it, with other modules.
    """
    tests = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", FRESH, str(tests), str(tests.parent)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert subprocess.check_output(command, env=environment, text=True) == "[[]]\n"


def echo_tensors(
    rank: int, world_size: int, *, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return {name: tensor * (rank + 1) for name, tensor in tensors.items()}


def report_process(rank: int, world_size: int) -> tuple[int, int, float]:
    return os.getpid(), torch.get_num_threads(), float(torch.rand(()))


def raise_on_one_rank(rank: int, world_size: int, *, culprit: int) -> None:
    if rank == culprit:
        raise LookupError(f"nothing to be found on {rank}")
    dist.barrier()


def raise_on_one_rank_while_another_sleeps(rank: int, world_size: int) -> None:
    if rank == 0:
        raise LookupError("the cause")
    time.sleep(600)


def end_on_one_rank(rank: int, world_size: int, *, how: str) -> None:
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "exit":
        os._exit(3)
    dist.barrier()


def leave_system(rank: int, world_size: int) -> None:
    raise SystemExit(0)


def return_what_cannot_travel(rank: int, world_size: int) -> object:
    return lambda: None


def sleep_instead_of_answering(rank: int, world_size: int) -> None:
    time.sleep(600)


def miss_the_next_meeting(rank: int, world_size: int) -> None:
    meet = dist.FileStore

    def meet_nobody(*_: object) -> dist.Store:
        vars(dist)["FileStore"] = meet
        return dist.HashStore()

    if rank == 1:
        vars(dist)["FileStore"] = meet_nobody


def warn_once(rank: int, world_size: int) -> None:
    warnings.warn("think twice", UserWarning, stacklevel=1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_by_rank_from_one_process_group(ranks: RankPool, world_size: int) -> None:
    results = ranks.run(gather_values, world_size, offset=torch.tensor(10))

    assert results == [[10 + rank for rank in range(world_size)]] * world_size


def test_tensors_of_any_dtype_and_stride_travel_both_ways(ranks: RankPool) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "float64": base.double(),
        "bfloat16": base.bfloat16(),
        "transposed": base.T,
        "slice": base[1:, ::2],
        "empty": base[:0],
        "differentiable": base.clone().requires_grad_() * 1,
    }

    results = ranks.run(echo_tensors, 2, tensors=tensors)

    for rank, result in enumerate(results):
        for name, tensor in tensors.items():
            torch.testing.assert_close(result[name], tensor * (rank + 1), rtol=0, atol=0)


def test_processes_are_kept_but_their_random_state_is_not(ranks: RankPool) -> None:
    first = ranks.run(report_process, 2)
    second = ranks.run(report_process, 4)

    assert second[:2] == first
    pids, threads, draws = zip(*second, strict=True)
    assert len({*pids, os.getpid()}) == 5
    assert set(threads) == {1}
    assert len(set(draws)) == 1


@pytest.mark.parametrize("culprit", [0, 2])
def test_exception_names_its_rank_first_and_spares_the_pool(ranks: RankPool, culprit: int) -> None:
    before = ranks.run(report_process, 3)

    with pytest.raises(RankError, match=f"LookupError: nothing to be found on {culprit}") as caught:
        ranks.run(raise_on_one_rank, 3, culprit=culprit)

    assert next(iter(caught.value.causes)) == culprit
    assert "in raise_on_one_rank" in caught.value.causes[culprit]
    assert ranks.run(report_process, 3) == before


@pytest.mark.full
def test_ranks_that_never_met_meet_in_the_next_call() -> None:
    with RankPool(size=3, collective_timeout=5.0) as pool:
        with suppress(RankError):  # of three that start, one may come more than 5 s late
            pool.run(report_process, 3)
        before = pool.run(report_process, 3)
        pool.run(miss_the_next_meeting, 2)

        with pytest.raises(RankError, match="timeout"):
            pool.run(report_process, 2)

        assert pool.run(report_process, 3) == before


def test_exit_and_unpicklable_results_are_failures(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="SystemExit"):
        ranks.run(leave_system, 1)
    with pytest.raises(RankError, match="return_what_cannot_travel"):
        ranks.run(return_what_cannot_travel, 1)


def test_warnings_are_treated_as_in_the_calling_test(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="UserWarning: think twice"):
        ranks.run(warn_once, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ranks.run(warn_once, 1) == [None]


@pytest.mark.parametrize(("how", "cause"), [("kill", "died of SIGKILL"), ("exit", "status 3")])
def test_dead_rank_fails_the_call_and_the_next_call_works(
    patient: RankPool, how: str, cause: str
) -> None:
    with pytest.raises(RankError) as caught:
        patient.run(end_on_one_rank, 2, how=how)

    assert cause in caught.value.causes[1]
    assert patient.run(gather_values, 2, offset=torch.tensor(0)) == [[0, 1]] * 2


def test_worker_that_died_between_calls_is_replaced(patient: RankPool) -> None:
    victim, _, _ = patient.run(report_process, 2)[1]
    handle = os.pidfd_open(victim)
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    select.select([handle], [], [])  # until it is dead
    os.close(handle)

    pids = {pid for pid, _, _ in patient.run(report_process, 2)}

    assert victim not in pids


@pytest.mark.parametrize(
    "fn", [sleep_instead_of_answering, full(raise_on_one_rank_while_another_sleeps)]
)
def test_silent_rank_is_killed_and_its_stack_is_shown(
    impatient: RankPool, fn: Callable[..., Any]
) -> None:
    with pytest.raises(RankError) as caught:
        impatient.run(fn, 2)

    assert "did not answer" in caught.value.causes[1]
    assert fn.__name__ in caught.value.causes[1]
    assert impatient.run(gather_values, 2, offset=torch.tensor(1)) == [[1, 2]] * 2


def test_impossible_world_size_is_refused(impatient: RankPool) -> None:
    with pytest.raises(ValueError, match="world_size is 3, but this pool has 2 workers"):
        impatient.run(report_process, 3)


def test_closing_ends_every_process() -> None:
    with RankPool(size=1) as pool:
        [(pid, _, _)] = pool.run(report_process, 1)

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
