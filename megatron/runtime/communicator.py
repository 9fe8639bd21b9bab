"""Carries out a program's communications on one rank: from the store, over a lane, to the store.

``start`` issues and returns at once; ``finish`` waits and leaves the result where the next pass
looks for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.layers.vocabulary import Merged, merge_statistics
from megatron.parallel import collectives, p2p
from megatron.parallel.groups import PipelineGroups
from megatron.parallel.lanes import Lane, Pending, make_lane
from megatron.runtime.stage_passes import StagePasses
from megatron.runtime.timeline import Recorder
from megatron.schedules.needs import Comm, CommKind, participants
from megatron.schedules.plan import Plan


@dataclass(frozen=True)
class Barrier:
    """What C1 leaves: merged statistics; with one barrier, on the last rank, the input gradient."""

    merged: Merged
    gradient_nh: Tensor | None


class Communicator:
    """Communications of one rank.

    Args:
        groups: the process groups.
        plan: the training plan.
        passes: this rank's passes; its store holds what is sent and receives what comes.
        activation_shape: [b, s, h] of what travels between stages.
        dtype: of activations.
    """

    def __init__(
        self,
        groups: PipelineGroups,
        plan: Plan,
        passes: StagePasses,
        activation_shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        self._groups = groups
        self._plan = plan
        self._passes = passes
        self._store = passes.store
        self._shape = activation_shape
        self._dtype = dtype
        self._lane: Lane = make_lane(groups.device, groups.size, "vocabulary")
        self._first = plan.stages[0][0]
        self._last_stage = len(plan.stages) - 1
        self._last = plan.stages[-1][0]
        self._collectives: Mapping[CommKind, Callable[[Comm], Callable[[], object]]] = {
            "C0": self._c0,
            "C1": self._c1,
            "C2": self._c2,
            "CIF": self._cif,
            "CIB": self._cib,
        }
        self.recorder: Recorder | None = None

    def start(self, comm: Comm) -> Pending[object]:
        """Issue ``comm``; its data is in the store if this rank has any."""
        if comm.kind in ("X", "G"):
            return self._start_transfer(comm)
        work = self._collectives[comm.kind](comm)
        if self.recorder is not None:
            work = self.recorder.timed(comm, work)
        return self._lane.submit(work)

    def finish(self, comm: Comm, pending: Pending[object]) -> None:
        """Wait for ``comm`` and put what this rank receives into the store."""
        result = pending.wait()
        i = comm.microbatch
        if comm.kind == "C1":
            assert isinstance(result, Barrier)
            self._store.get("state", i).drop_gradient()
            self._store.put("merged", i, result.merged)
            if result.gradient_nh is not None:
                self._store.put("output_gradient", i, result.gradient_nh, self._last_stage)
            return
        destination = self._destination(comm)
        if destination is not None:
            name, place = destination
            self._store.put(name, i, result, place)

    def close(self) -> None:
        """Give the lane back."""
        self._lane.close()

    def _destination(self, comm: Comm) -> tuple[str, int] | None:
        """Return the (name, place) under which this rank keeps what it receives, if anything."""
        rank = self._groups.rank
        if comm.kind in ("X", "G"):
            receiver = participants(self._plan, comm)[1]
            if rank != receiver:
                return None
            if comm.kind == "X":
                return "input", comm.stage + 1
            return "output_gradient", comm.stage - 1
        if comm.kind == "C0":
            return ("x", 0) if rank != self._last else None
        if comm.kind == "C2":
            return ("output_gradient", self._last_stage) if rank == self._last else None
        if comm.kind == "CIF":
            return ("input", 0) if rank == self._first else None
        return ("input_gradient", 0) if rank != self._first else None

    def _start_transfer(self, comm: Comm) -> Pending[object]:
        forward = comm.kind == "X"
        group = self._groups.forward if forward else self._groups.backward
        sender, receiver = participants(self._plan, comm)
        if self._groups.rank == sender:
            name = "output" if forward else "input_gradient"
            return p2p.send(self._store.take(name, comm.microbatch, comm.stage), receiver, group)
        return p2p.receive(self._buffer(), sender, group)

    def _buffer(self) -> Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._groups.device)

    def _broadcast(self, name: str, comm: Comm, root: int) -> Callable[[], Tensor]:
        at_root = self._groups.rank == root
        tensor = self._store.get(name, comm.microbatch) if at_root else self._buffer()
        groups = self._groups
        return lambda: collectives.broadcast(tensor, root, groups.vocabulary, groups.size)

    def _reduce(self, name: str, comm: Comm, root: int) -> Callable[[], Tensor]:
        tensor = self._store.take(name, comm.microbatch)
        groups = self._groups
        return lambda: collectives.reduce(tensor, root, groups.vocabulary, groups.size)

    def _c0(self, comm: Comm) -> Callable[[], Tensor]:
        return self._broadcast("x", comm, self._last)

    def _cib(self, comm: Comm) -> Callable[[], Tensor]:
        return self._broadcast("input_gradient", comm, self._first)

    def _c2(self, comm: Comm) -> Callable[[], Tensor]:
        return self._reduce("partial_gradient", comm, self._last)

    def _cif(self, comm: Comm) -> Callable[[], Tensor]:
        return self._reduce("partial_embedding", comm, self._first)

    def _c1(self, comm: Comm) -> Callable[[], Barrier]:
        """Gather and merge the statistics; with one barrier also sum the input gradient.

        One all-gather of all statistics, 4 p fp32 vectors of n, is less traffic than one more
        activation as long as p is well below h / 8, and saves two of three latencies in a row.
        """
        i, groups = comm.microbatch, self._groups
        state = self._store.get("state", i)

        def work() -> Barrier:
            gathered = collectives.all_gather(state.statistics_4n, groups.vocabulary, groups.size)
            merged = merge_statistics(gathered)
            if state.raw_gradient_nh is None:
                return Barrier(merged, None)
            gradient_nh = self._passes.gradient_after_merge(i, state, merged)
            collectives.reduce(gradient_nh, self._last, groups.vocabulary, groups.size)
            return Barrier(merged, gradient_nh if groups.rank == self._last else None)

        return work
