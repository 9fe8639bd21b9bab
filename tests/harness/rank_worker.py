"""One persistent process of the rank pool: it plays any rank of any call, one call after the other.

Every call gets a fresh process group and a fresh random state, so that a test sees the same ranks
whether it runs alone or last.
"""

import faulthandler
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
import torch.distributed as dist

READY = b"ready"
"""What a worker says first, once it has imported torch."""


@dataclass(frozen=True)
class PoolTask:
    """One call, as one rank sees it.

    Attributes:
        rank: the rank to play.
        world_size: ranks that take part.
        store_path: file of the store of this call; no file of that name exists yet.
        collective_timeout: seconds until a collective that some rank never joined raises.
        sys_path: the pool's import path, with which the function's module is found.
        call: pickle of ``(function, keyword arguments, warning filters)``.
    """

    rank: int
    world_size: int
    store_path: str
    collective_timeout: float
    sys_path: list[str]
    call: bytes


def serve(connection: Connection, stacks_path: str) -> None:
    """Say that this worker is ready, and answer jobs until the pool closes its end.

    A job arrives as a pickled `PoolTask`; the answer is the pickle of ``(None, result)`` or of
    ``(seconds on the machine's monotonic clock when it raised, traceback text)``.

    Args:
        connection: this worker's end of the pipe.
        stacks_path: file that receives the stacks of all threads on SIGUSR1, even while the
            worker is stuck inside a collective.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to handle
    torch.set_num_threads(1)
    with open(stacks_path, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        connection.send_bytes(READY)
        while True:
            try:
                job = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            connection.send_bytes(_answer(job))


def _answer(job: PoolTask) -> bytes:
    try:
        sys.path[:] = job.sys_path
        from harness.shared_plans import shared_plans  # can be found from here on

        with _process_group(job), shared_plans():
            return _call(job)
    except BaseException:
        return _failure()


def _call(job: PoolTask) -> bytes:
    # Plain pickle copies tensors by value. The pickler of multiprocessing, which torch extends,
    # would share their memory through file descriptors and tie a result to the worker's life.
    try:
        function, kwargs, warning_filters = pickle.loads(job.call)
        random.seed(0)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        with _warnings_as_in(warning_filters):
            answer = pickle.dumps((None, function(job.rank, job.world_size, **kwargs)))
        if dist.is_initialized():
            dist.barrier()  # nobody hangs up while another still receives
        return answer
    except BaseException:  # pytest.fail and SystemExit are answers as well
        return _failure()  # dated before this rank hangs up and makes the others raise


def _failure() -> bytes:
    return pickle.dumps((time.monotonic(), traceback.format_exc()))


@contextmanager
def _process_group(job: PoolTask) -> Iterator[None]:
    timeout = timedelta(seconds=job.collective_timeout)
    store = dist.FileStore(job.store_path, job.world_size)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout
        )
    except BaseException:
        _forget_failed_group()
        raise
    try:
        dist.barrier()  # a rank that raises at once must not hang up on one that still connects
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _forget_failed_group() -> None:
    """Let the next group have the same name here as on every other rank.

    PyTorch names groups by counting them. A failed initialisation stays counted until some group
    is destroyed; without that, this worker would never again find the others in a store.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


@contextmanager
def _warnings_as_in(filters: list[tuple[Any, ...]]) -> Iterator[None]:
    """Apply the test process's filters, so that a warning is as much an error here as there."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        cast(list[Any], warnings.filters).extend(filters)
        yield
