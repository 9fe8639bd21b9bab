"""Rank processes on this machine, in any number, that run programs together.

A fault in one rank ends the whole cluster, with a message that names the rank, so nothing hangs.
"""

import math
import multiprocessing
import signal
import time
from contextlib import AbstractContextManager, suppress
from multiprocessing import connection
from typing import Any

import torch.distributed as dist

from megatron.parallel.grid import Grid
from tools.emulation.emulated_passes import measure_overshoot
from tools.emulation.rank import EmulatedJob, Failure, Outcome, Place, serve

PATIENCE = 30.0
"""Seconds beyond twice the expected time after which a silent rank is taken for stuck."""

START = 60.0
"""Seconds that the ranks may take to meet, and a tenth of it more for each."""

GRACE = 2.0
"""Seconds that the other ranks have to answer once a rank has failed; most of their failures follow
from the first one."""


class ClusterError(RuntimeError):
    """A rank failed, and with it the cluster."""


class Cluster(AbstractContextManager["Cluster"]):
    """Rank processes, started once; use it as a context manager.

    Args:
        ranks: pipeline ranks of a replica.
        realtime: give the ranks precedence over all other processes of this machine.
        patience: seconds beyond twice the expected time after which a silent rank is stuck.
        replicas: number of pipelines.

    Attributes:
        processes: the ranks.

    Raises:
        ClusterError: if a rank does not get ready.
    """

    def __init__(
        self,
        ranks: int,
        realtime: bool = False,
        patience: float = PATIENCE,
        replicas: int = 1,
    ) -> None:
        grid = Grid(data_size=replicas, pipeline_size=ranks)
        self._patience = patience
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        overshoot = measure_overshoot()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])  # once, not once a rank
        self.processes: list[Any] = []
        self._connections: list[connection.Connection] = []
        for rank in range(grid.world_size):
            near, far = context.Pipe()
            place = Place(rank, grid, self._store.port, overshoot, realtime)
            process = context.Process(target=serve, args=(far, place), daemon=True)
            process.start()
            far.close()  # so that the rank's death is the end of file on our side
            self.processes.append(process)
            self._connections.append(near)
        try:
            self._answers(START * (1 + grid.world_size / 10))
        except BaseException:
            self.close()
            raise

    def run(self, job: EmulatedJob, expected: float) -> list[Outcome]:
        """Run ``job`` on all ranks and return the outcomes by rank.

        Args:
            job: a job whose replicas have as many ranks as those of the cluster.
            expected: seconds that the job should take.

        Raises:
            ClusterError: if a rank raises, dies, or is silent for too long.
        """
        for each in self._connections:
            with suppress(BrokenPipeError):  # a dead rank: its answer says how it died
                each.send(job)
        return self._answers(2 * expected + self._patience)

    def _answers(self, timeout: float) -> list[Any]:
        """Return the answers of the ranks; after a failure, the other ranks get little time."""
        deadline = time.monotonic() + timeout
        silent = {each: rank for rank, each in enumerate(self._connections)}
        answers: dict[int, Any] = {}
        failures: list[Failure] = []
        while silent:
            ready = connection.wait(list(silent), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for each in [each for each in silent if each in ready]:
                rank = silent.pop(each)
                answers[rank] = self._receive(rank, each)
                if isinstance(answers[rank], Failure):
                    failures.append(answers[rank])
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            raise ClusterError(min(failures, key=lambda failure: failure.when).what)
        if silent:
            ranks = ", ".join(map(str, silent.values()))
            raise ClusterError(f"no answer from rank {ranks} within {timeout:.0f} seconds")
        return [answers[rank] for rank in range(len(answers))]

    def _receive(self, rank: int, source: connection.Connection) -> Any:
        """Return the answer of ``rank``; its own death is told before the failures that follow."""
        try:
            return source.recv()
        except (EOFError, OSError):
            self.processes[rank].join(GRACE)
            code = self.processes[rank].exitcode
            how = f"of {signal.Signals(-code).name}" if code and code < 0 else f"with status {code}"
            return Failure(-math.inf, f"rank {rank} died {how}")

    def close(self) -> None:
        """End all ranks, whatever they are doing."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for each in self._connections:
            each.close()

    def __exit__(self, *_: object) -> None:
        self.close()
