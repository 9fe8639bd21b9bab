"""One process of an emulated cluster: it plays one rank, job after job."""

import os
import random
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from megatron.parallel.collectives import broadcast
from megatron.parallel.grid import Grid
from megatron.parallel.groups import Groups, make_groups
from megatron.parallel.lanes import Lane, make_lane
from megatron.runtime.executor import Executor
from megatron.schedules.costs import Costs
from megatron.schedules.lower import Program
from megatron.schedules.needs import Comm
from megatron.schedules.passes import Pass
from megatron.training.metrics.peak_memory import peak_memory
from tools.emulation.emulated_passes import EmulatedCommunicator, EmulatedPasses, Pacer

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Longer than any pass may be emulated: it is the cluster that notices when somebody is stuck."""

HEAD_START = 0.02
"""Seconds between the agreement on a common start and the start, and as much for every rank."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        rank: pipeline rank.
        size: pipeline ranks.
        port: of the store on this machine at which the ranks meet.
        overshoot: seconds by which a sleep takes too long here.
        realtime: take precedence over everything else on this machine.
    """

    rank: int
    size: int
    port: int
    overshoot: float
    realtime: bool


@dataclass(frozen=True)
class EmulatedJob:
    """What all ranks are to run.

    Attributes:
        program: the program.
        costs: times of passes and communications.
        unit: seconds of a unit of ``costs``.
        iterations: how often.
        jitter: every pass takes up to this share more or less time, by chance.
        seed: of that chance.
    """

    program: Program
    costs: Costs
    unit: float
    iterations: int
    jitter: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a rank did.

    Attributes:
        seconds: for every iteration, the time from the common start to its end on this rank.
        checksums: for every iteration, the sum over what the passes have come to.
        overheads: for every pass of every iteration, the seconds spent on it awake.
        peaks: after every iteration, the most bytes that the process has held.
    """

    seconds: list[float]
    checksums: list[int]
    overheads: list[float]
    peaks: list[int]


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank.

    Attributes:
        when: time on the monotonic clock.
        what: the rank, and the text of its traceback.
    """

    when: float
    what: str


def serve(connection: Connection, place: Place) -> None:
    """Run the jobs that come over ``connection``, and answer each with an outcome or a failure."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if place.realtime:
        _take_realtime_priority()
    try:
        store = dist.TCPStore("127.0.0.1", place.port, timeout=COLLECTIVE_TIMEOUT)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        groups = make_groups(
            Grid(pipeline_size=place.size), torch.device("cpu"), COLLECTIVE_TIMEOUT, ends=(0, 0)
        )
        lane = make_lane(groups.device, groups.vocabulary.size, "vocabulary")
        connection.send(None)
        while True:
            connection.send(_run(connection.recv(), groups, lane, place.overshoot))
    except EOFError:
        pass
    except BaseException:
        what = f"rank {place.rank} failed:\n{traceback.format_exc()}"
        connection.send(Failure(time.monotonic(), what))
    os._exit(0)  # peers may be gone already: nobody is there to say goodbye to


def _take_realtime_priority() -> None:
    """Give this process, and all threads to come, precedence (Linux; needs the right to).

    gloo's thread spins while another thread of its process holds the lock of a connection. If the
    other thread has lost its core to another process, the spin lasts for a time slice, which is
    some milliseconds.
    """
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(job: EmulatedJob, groups: Groups, lane: Lane, overshoot: float) -> Outcome:
    def seconds(comm: Comm) -> float:
        return job.unit * job.costs.of_comm(comm)

    plan, pacer = job.program.plan, Pacer(_duration(job, groups.pipeline.rank), seconds, overshoot)
    passes = EmulatedPasses(plan, groups.pipeline.rank)
    communicator = EmulatedCommunicator(groups, plan, passes, lane, seconds, pacer)
    executor = Executor(passes, communicator)
    outcome = Outcome([], [], [], [])
    for _ in range(job.iterations):
        start = _common_start(groups)
        pacer.begin(start)
        passes.checksum = 0
        executor.run(job.program, pacer)
        outcome.seconds.append(time.monotonic() - start)
        assert not len(passes.store), "an iteration has left something in the store"
        outcome.checksums.append(passes.checksum)
        outcome.overheads.extend(pacer.overheads)
        outcome.peaks.append(peak_memory(groups.device).held)
    return outcome


def _duration(job: EmulatedJob, rank: int) -> Callable[[Pass], float]:
    """Return what tells how many seconds a pass takes."""
    chance = random.Random(f"{job.seed} {rank}")

    def duration(item: Pass) -> float:
        seconds = job.unit * job.costs.of_pass(job.program.plan, rank, item)
        return seconds * (1 + job.jitter * chance.uniform(-1, 1)) if job.jitter else seconds

    return duration


def _common_start(groups: Groups) -> float:
    """Return a time on the monotonic clock, the same on every rank, soon after all have met."""
    groups.world.barrier()
    start = torch.tensor(
        [time.monotonic() + HEAD_START * (1 + groups.world.size / 8)], dtype=torch.float64
    )
    return broadcast(start, 0, groups.world).item()
