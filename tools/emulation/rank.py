"""One process of an emulated cluster: it plays one rank, job after job."""

import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from megatron.parallel.grid import Grid
from megatron.parallel.groups import Groups, make_groups
from megatron.parallel.lanes import Lane, make_lane
from megatron.runtime.clocks import common_start
from megatron.runtime.executor import Executor
from megatron.runtime.offload import HostBuffers, HostCopies
from megatron.schedules.buckets import Bucket
from megatron.schedules.costs import Costs
from megatron.schedules.lower import Program
from megatron.schedules.needs import Comm
from megatron.schedules.passes import Pass
from megatron.simulator.clocks import comm_time, pass_time
from megatron.training.metrics.peak_memory import peak_memory
from tools.emulation.emulated_communicator import EmulatedCommunicator
from tools.emulation.emulated_passes import MODULUS, EmulatedPasses, Pacer, overheads_of
from tools.emulation.emulated_replicas import EmulatedBuckets, EmulatedReplicaWork

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Longer than any pass may be emulated: it is the cluster that notices when somebody is stuck."""

HEAD_START = 0.02
"""Seconds between the agreement on a common start and the start, and as much for every rank."""


@dataclass(frozen=True)
class Place:
    """The place of a rank in an emulated cluster.

    Attributes:
        rank: of the job.
        grid: of all ranks.
        port: of the store on this machine at which the ranks meet.
        overshoot: seconds by which a sleep takes too long here.
        realtime: take precedence over everything else on this machine.
    """

    rank: int
    grid: Grid
    port: int
    overshoot: float
    realtime: bool


@dataclass(frozen=True)
class Lanes:
    """The lanes of a rank.

    Attributes:
        vocabulary: of the vocabulary's collectives.
        gradients: of the work with replicas.
        host: of the copies to and from the host.
    """

    vocabulary: Lane
    gradients: Lane
    host: Lane


@dataclass(frozen=True)
class EmulatedJob:
    """The job that all ranks run.

    Attributes:
        program: the program.
        costs: times of passes and communications.
        unit: seconds of a unit of ``costs``.
        iterations: number of iterations.
        buckets: of every pipeline rank, if there are replicas.
        sharded: whether the optimizer is sharded over them.
        jitter: every pass takes up to this share more or less time, by chance.
        seed: seed of the random times.
    """

    program: Program
    costs: Costs
    unit: float
    iterations: int
    jitter: float = 0.0
    seed: int = 0
    buckets: Sequence[Sequence[Bucket]] = ()
    sharded: bool = False


@dataclass(frozen=True)
class Outcome:
    """The measurements of a rank in a job.

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
    """A failure of a rank.

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
            world_size=place.grid.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        groups = make_groups(place.grid, torch.device("cpu"), COLLECTIVE_TIMEOUT, ends=(0, 0))
        lanes = Lanes(
            make_lane(groups.device, groups.vocabulary.size, "vocabulary"),
            make_lane(groups.device, groups.gradients.size, "gradients"),
            make_lane(groups.device, 2, "host"),  # a copy has two sides: the rank and its host
        )
        connection.send(None)
        while True:
            connection.send(run_job(connection.recv(), groups, lanes, place.overshoot))
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


def run_job(job: EmulatedJob, groups: Groups, lanes: Lanes, overshoot: float) -> Outcome:
    """Run a job on this rank; all ranks of the groups do.

    Args:
        job: what to run.
        groups: this rank's view of the grid.
        lanes: of this rank.
        overshoot: seconds by which a sleep takes too long here.
    """

    def seconds(comm: Comm) -> float:
        return job.unit * comm_time(job.program, job.costs, comm)

    plan, rank = job.program.plan, groups.pipeline.rank

    def waits(item: Pass) -> float:
        return job.unit * job.costs.waits_of(plan, rank, item)

    pacer = Pacer(rank, _duration(job, groups), seconds, overshoot, waits)
    buckets = EmulatedBuckets(job.buckets[rank] if job.buckets else (), groups.gradients)
    host = _host_copies(job.program, rank, lanes.host) if plan.offloaded else None
    passes = EmulatedPasses(plan, rank, groups.data.rank, buckets, pacer, host)
    communicator = EmulatedCommunicator(groups, plan, passes, lanes.vocabulary, seconds, pacer)
    work = EmulatedReplicaWork(
        buckets, lanes.gradients, sharded=job.sharded, updated=passes.updated
    )
    executor = Executor(passes, communicator, replicas=work, turns=pacer.turns, host=host)
    outcome = Outcome([], [], [], [])
    for _ in range(job.iterations):
        start = common_start(groups)[0] + HEAD_START * (1 + groups.world.size / 8)
        pacer.sleep_until(start)
        pacer.begin(start)
        passes.checksum = 0
        if host is not None:
            host.begin(())
        executor.run(job.program, pacer)
        outcome.seconds.append(time.perf_counter() - start)
        assert not len(passes.store), "an iteration has left something in the store"
        outcome.checksums.append((passes.checksum + work.total()) % MODULUS)
        buckets.clear()
        outcome.overheads.extend(overheads_of(pacer.spans()))
        outcome.peaks.append(peak_memory(groups.device).held)
    return outcome


def _host_copies(program: Program, rank: int, lane: Lane) -> HostCopies:
    device = torch.device("cpu")
    return HostCopies(program, rank, (), lane, HostBuffers(device), device)


def _duration(job: EmulatedJob, groups: Groups) -> Callable[[Pass], float]:
    """Return a function from a pass to its seconds."""
    rank, chance = groups.pipeline.rank, random.Random(f"{job.seed} {groups.world.rank}")

    def duration(item: Pass) -> float:
        seconds = job.unit * pass_time(job.program, job.costs, rank, item)
        return seconds * (1 + job.jitter * chance.uniform(-1, 1)) if job.jitter else seconds

    return duration
