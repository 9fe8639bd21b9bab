"""Carries out a program's communications on one rank: from the store, over a lane, to the store.

``start`` issues and returns at once; ``finish`` waits and leaves the result where the next pass
looks for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.layers.vocabulary.output_s import Merged, merge_statistics
from megatron.parallel import collectives, p2p
from megatron.parallel.groups import Groups
from megatron.parallel.lanes import Lane, Pending
from megatron.runtime.observer import Observer
from megatron.runtime.rank_passes import Passes
from megatron.schedules.needs import Comm, CommKind, participants
from megatron.schedules.plan import Plan


@dataclass(frozen=True)
class Barrier:
    """What C1 leaves: merged statistics; with one barrier, on the last rank, the input gradient."""

    merged: Merged
    gradient_nh: Tensor | None


@dataclass(frozen=True)
class _Collective:
    """A kind of collective.

    Attributes:
        prepare: takes what is sent from the store, and returns the work for the lane.
        deliver: puts the result for a microbatch into the store, if this rank has a use for it.
    """

    prepare: Callable[[int], Callable[[], object]]
    deliver: Callable[[int, Any], None]


class Communicator:
    """Communications of one rank.

    Args:
        groups: the axes and their process groups.
        plan: the training plan.
        passes: this rank's passes; its store holds what is sent and receives what comes.
        lane: where collectives run beside the passes.
        activation_shape: [b, s, h] of what travels between stages.
        dtype: of activations.

    Attributes:
        passes: whose store is used, and whose arithmetic C1 needs; may be exchanged.
        recorder: records the collectives, if any.
    """

    def __init__(
        self,
        groups: Groups,
        plan: Plan,
        passes: Passes,
        lane: Lane,
        activation_shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        self.passes = passes
        self.recorder: Observer | None = None
        self._groups = groups
        self._plan = plan
        self._lane = lane
        self._shape = activation_shape
        self._dtype = dtype
        # where the ends of the data flow are on the vocabulary axis
        self._first = groups.grid.vocabulary_rank(plan.stages[0][0])
        self._last_stage = len(plan.stages) - 1
        self._last = groups.grid.vocabulary_rank(plan.stages[-1][0])
        self._collectives = self._make_collectives()

    def start(self, comm: Comm) -> Pending[object]:
        """Issue ``comm``; its data is in the store if this rank has any."""
        if comm.kind in ("X", "G"):
            return self._start_transfer(comm)
        work = self._collectives[comm.kind].prepare(comm.microbatch)
        if self.recorder is not None:
            work = self.recorder.timed(comm, work)
        return self._lane.submit(work)

    def finish(self, comm: Comm, pending: Pending[object]) -> None:
        """Wait for ``comm`` and put what this rank receives into the store."""
        result = pending.wait()
        i = comm.microbatch
        if comm.kind not in ("X", "G"):
            self._collectives[comm.kind].deliver(i, result)
        elif self._groups.pipeline.rank == participants(self._plan, comm)[1]:
            forward = comm.kind == "X"
            name = "input" if forward else "output_gradient"
            self.passes.store.put(name, i, result, comm.stage + (1 if forward else -1))

    def _start_transfer(self, comm: Comm) -> Pending[object]:
        forward = comm.kind == "X"
        # on a CPU both have one group, so the tag tells them apart
        axis, tag = (self._groups.forward, 0) if forward else (self._groups.backward, 1)
        sender, receiver = participants(self._plan, comm)
        if axis.rank == sender:
            name = "output" if forward else "input_gradient"
            tensor = self.passes.store.take(name, comm.microbatch, comm.stage)
            return p2p.send(tensor, receiver, axis, tag)
        return p2p.receive(self._buffer(), sender, axis, tag)

    def _buffer(self) -> Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._groups.device)

    def _make_collectives(self) -> Mapping[CommKind, _Collective]:
        """Return what each kind does; that of the barriers depends on how many there are."""
        first, last = self._first, self._last
        statistics = _Collective(self._merge, self._deliver_barrier)
        gradient = self._reduction("partial_gradient", last, "output_gradient", self._last_stage)
        barriers: dict[int | None, dict[CommKind, _Collective]] = {
            None: {},
            1: {"C1": statistics},
            2: {"C1": statistics, "C2": gradient},
            3: {
                "C1": self._all_reduction("maximum_n", "maximum", collectives.MAXIMUM),
                "C2": self._all_reduction("sums_kn", "sums", collectives.SUM),
                "C3": gradient,
            },
        }
        return {
            "C0": self._broadcast("x", last),
            "CIF": self._reduction("partial_embedding", first, "input"),
            "CIB": self._broadcast("input_gradient", first),
            **barriers[self._plan.barriers],
        }

    def _broadcast(self, name: str, root: int) -> _Collective:
        """Return the broadcast of ``name``, which the root has already."""
        axis, at_root = self._groups.vocabulary, self._groups.vocabulary.rank == root

        def prepare(i: int) -> Callable[[], Tensor]:
            tensor = self.passes.store.get(name, i) if at_root else self._buffer()
            return lambda: collectives.broadcast(tensor, root, axis)

        def deliver(i: int, tensor: Tensor) -> None:
            if not at_root:
                self.passes.store.put(name, i, tensor)

        return _Collective(prepare, deliver)

    def _reduction(self, name: str, root: int, result: str, place: int = 0) -> _Collective:
        """Return the sum of everybody's ``name``, which becomes the root's ``result``."""
        axis = self._groups.vocabulary

        def prepare(i: int) -> Callable[[], Tensor]:
            tensor = self.passes.store.take(name, i)
            return lambda: collectives.reduce(tensor, root, axis)

        def deliver(i: int, tensor: Tensor) -> None:
            if axis.rank == root:
                self.passes.store.put(result, i, tensor, place)

        return _Collective(prepare, deliver)

    def _all_reduction(
        self, part: str, result: str, operation: "collectives.Operation"
    ) -> _Collective:
        """Return the combination of a ``part`` of everybody's state, ``result`` for all."""
        axis = self._groups.vocabulary

        def prepare(i: int) -> Callable[[], Tensor]:
            # A copy: the state keeps its own part.
            tensor = getattr(self.passes.store.get("state", i), part).clone()
            return lambda: collectives.all_reduce(tensor, operation, axis)

        def deliver(i: int, tensor: Tensor) -> None:
            self.passes.store.put(result, i, tensor)

        return _Collective(prepare, deliver)

    def _merge(self, i: int) -> Callable[[], Barrier]:
        """C1: gather and merge the statistics; with one barrier also sum the input gradient.

        One all-gather of all statistics, 4 p fp32 vectors of n, is less traffic than one more
        activation as long as p is well below h / 8, and saves two of three latencies in a row.
        """
        passes, axis, last = self.passes, self._groups.vocabulary, self._last
        state = passes.store.get("state", i)

        def work() -> Barrier:
            gathered = collectives.all_gather(state.statistics_4n, axis)
            merged = merge_statistics(gathered)
            if state.raw_gradient_nh is None:
                return Barrier(merged, None)
            gradient_nh = passes.gradient_after_merge(i, state, merged)
            state.drop_gradient()  # not in ``_deliver_barrier``: that may not be before T
            collectives.reduce(gradient_nh, last, axis)
            return Barrier(merged, gradient_nh if axis.rank == last else None)

        return work

    def _deliver_barrier(self, i: int, barrier: Barrier) -> None:
        store = self.passes.store
        store.put("merged", i, barrier.merged)
        if barrier.gradient_nh is not None:
            store.put("output_gradient", i, barrier.gradient_nh, self._last_stage)
