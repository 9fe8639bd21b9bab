"""Carries out a program's communications on one rank.

Tensors to send come from the activation store, and received tensors go into it. A lane runs
collectives while passes run. ``start`` issues a communication and returns at once; ``finish``
waits, and leaves the result in the store for the next pass.

Between stages a tensor-parallel rank sends its own tokens, [b, u, h]; behind the stage that
predicts D further tokens, [(1 + D) b, u, h]. The vocabulary's collectives have two levels
(``two_level``), and move all tokens, [n, h], in the order of the ranks' parts.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.layers.vocabulary.output_s import Merged, merge_some_statistics
from megatron.parallel import collectives, p2p
from megatron.parallel.groups import Groups
from megatron.parallel.lanes import Lane, Pending
from megatron.parallel.links import Link, in_rounds
from megatron.parallel.two_level import TwoLevels
from megatron.runtime.observer import Observer
from megatron.runtime.rank_passes import Passes
from megatron.runtime.units import UnitTensors
from megatron.schedules.needs import Comm, CommKind, participants
from megatron.schedules.plan import Plan
from megatron.schedules.treatments import Barrier, Payload


@dataclass(frozen=True)
class _Collective:
    """A kind of collective.

    Attributes:
        prepare: takes the data to send from the store, and returns the work for the lane.
        deliver: puts the result for a unit into the store, if this rank needs it.
    """

    prepare: Callable[[int], Callable[[], object]]
    deliver: Callable[[int, Any], None]


Moved = MutableMapping[Payload, Any]
"""Results of the payloads that a barrier has moved so far."""


@dataclass(frozen=True)
class _Part:
    """How one payload of a barrier is moved.

    Attributes:
        prepare: as in ``_Collective``; the work receives the results of the earlier payloads.
        deliver: as in ``_Collective``.
    """

    prepare: Callable[[int], Callable[[Moved], object]]
    deliver: Callable[[int, Any], None]


def links_of(plan: Plan) -> tuple[Link, ...]:
    """Return the links of a plan's stages, in the order in which they are made."""
    stages = range(len(plan.stages))
    comms = [Comm("X", 0, s) for s in stages[:-1]] + [Comm("G", 0, s) for s in stages[1:]]
    links = (Link(comm.kind, *participants(plan, comm)) for comm in comms)
    return in_rounds(link for link in links if link.sender != link.receiver)


class Communicator:
    """Communications of one rank.

    Args:
        groups: the axes and their process groups.
        plan: the training plan.
        passes: this rank's passes; their store holds the data to send, and gets the received data.
        lane: where collectives run while passes run.
        tensors: the shapes and types of the tensors that ranks send each other.

    Attributes:
        passes: the passes with the store; a barrier may call their ``merge``. May be exchanged.
        recorder: records the collectives; ``None``: nothing is recorded.
    """

    def __init__(
        self,
        groups: Groups,
        plan: Plan,
        passes: Passes,
        lane: Lane,
        tensors: UnitTensors,
    ) -> None:
        self.passes = passes
        self.recorder: Observer | None = None
        self._groups = groups
        self._plan = plan
        self._lane = lane
        self._tensors = tensors
        wants_parts = tensors.sequence_parts > 1
        self._levels = TwoLevels(groups.row, groups.column, wants_parts=wants_parts)
        # pipeline ranks of the first and the last stage, and of the stage that looks ahead
        self._first = plan.stages[0][0]
        self._last_stage = len(plan.stages) - 1
        self._last = plan.stages[-1][0]
        self._ahead = plan.readers[-1][0]
        self._collectives = self._make_collectives()

    def start(self, comm: Comm) -> Pending[object]:
        """Issue ``comm``; data that this rank sends must be in the store."""
        if comm.kind in ("X", "G"):
            return self._start_transfer(comm)
        work = self._collectives[comm.kind].prepare(self._plan.unit(comm))
        if self.recorder is not None:
            work = self.recorder.timed(comm, work)
        return self._lane.submit(work)

    def finish(self, comm: Comm, pending: Pending[object]) -> None:
        """Wait for ``comm``, and put the received tensor or result into the store."""
        result = pending.wait()
        i = self._plan.unit(comm)
        if comm.kind not in ("X", "G"):
            self._collectives[comm.kind].deliver(i, result)
        elif self._groups.pipeline.rank == participants(self._plan, comm)[1]:
            forward = comm.kind == "X"
            name = "input" if forward else "output_gradient"
            self.passes.store.put(name, i, result, comm.stage + (1 if forward else -1))

    def _start_transfer(self, comm: Comm) -> Pending[object]:
        forward = comm.kind == "X"
        link = Link(comm.kind, *participants(self._plan, comm))
        axis, other = self._groups.way(link)
        tag = 0 if forward else 1  # X and G may share a group: the tag tells them apart
        if self._groups.pipeline.rank == link.sender:
            name = "output" if forward else "input_gradient"
            tensor = self.passes.store.take(name, self._plan.unit(comm), comm.stage)
            return p2p.send(tensor, other, axis, tag)
        before = comm.stage if forward else comm.stage - 1
        shape, dtype = self._tensors.message(
            self._plan.unit(comm),
            self.passes.depths,
            has_depths=self._plan.hands_on_predictions(before),
        )
        return p2p.receive(self._buffer(shape, dtype), other, axis, tag)

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._groups.device)

    def _ahead_shape(self, i: int) -> tuple[int, int, int]:
        return self._tensors.ahead(i, self.passes.depths)

    def _output_shape(self, i: int) -> tuple[int, int, int]:
        return self._tensors.output(i, self.passes.depths)

    def _make_collectives(self) -> Mapping[CommKind, _Collective]:
        """Return the collective of each kind; barriers move their payloads one by one."""
        parts, first, ahead, stage = self._parts(), self._first, self._ahead, self._tensors.stage
        return {
            "C0": self._broadcast("x", self._last, self._output_shape),
            "CIF": self._at_both_readers(
                self._reduction("partial_embedding", first, "input", stage),
                self._reduction("partial_ahead", ahead, "ahead", self._ahead_shape),
            ),
            "CIB": self._at_both_readers(
                self._broadcast("input_gradient", first, stage),
                self._broadcast("ahead_gradient", ahead, self._ahead_shape),
            ),
            **{barrier.kind: _chain(barrier, parts) for barrier in self._plan.treatment.barriers},
        }

    def _parts(self) -> Mapping[Payload, _Part]:
        """Return how each payload is moved; a new kind of payload needs a row here."""
        return {
            "statistics": _Part(self._gather_statistics, self._put("merged")),
            "maximum": _Part(self._combine("maximum_n", collectives.MAXIMUM), self._put("maximum")),
            "sums": _Part(self._combine("sums_kn", collectives.SUM), self._put("sums")),
            "gradient": self._gradient(),
        }

    def _at_both_readers(self, first: _Collective, ahead: _Collective) -> _Collective:
        """Return a collective that runs ``first``; with multi-token prediction also ``ahead``."""

        def prepare(i: int) -> Callable[[], list[object]]:
            readers = [first, ahead] if self.passes.depths else [first]
            works = [reader.prepare(i) for reader in readers]
            return lambda: [work() for work in works]

        def deliver(i: int, results: list[object]) -> None:
            for reader, result in zip((first, ahead), results, strict=False):
                reader.deliver(i, result)

        return _Collective(prepare, deliver)

    def _broadcast(
        self, name: str, root: int, shape: Callable[[int], tuple[int, int, int]]
    ) -> _Collective:
        """Return the broadcast of ``name`` from the ranks of ``root``, which already hold it.

        Args:
            name: of a tensor with all tokens, in the order of their parts.
            root: pipeline rank that sends the tensor.
            shape: returns the shape of one rank's part of the tensor in a unit.
        """
        levels, at_root = self._levels, self._groups.pipeline.rank == root

        def prepare(i: int) -> Callable[[], Tensor]:
            if at_root:
                # Not taken: the root's own S or IB still takes the tensor.
                tensor = self.passes.store.get(name, i)
            else:
                tensor = self._buffer(self._tensors.of_all(shape(i)), self._tensors.dtype)
            return lambda: levels.broadcast(tensor, root)

        def deliver(i: int, tensor: Tensor) -> None:
            if not at_root:
                self.passes.store.put(name, i, tensor)

        return _Collective(prepare, deliver)

    def _reduction(
        self, name: str, root: int, result: str, shape: Callable[[int], tuple[int, int, int]]
    ) -> _Collective:
        """Return the reduction that sums all ranks' ``name`` into the root's ``result``.

        Args:
            name: of a tensor with all tokens, in the order of their parts.
            root: pipeline rank that gets the sum.
            result: name of the sum; each rank of the root gets the sum for its own tokens.
            shape: returns the shape of the result in a unit.
        """
        levels, at_root = self._levels, self._groups.pipeline.rank == root

        def prepare(i: int) -> Callable[[], Tensor]:
            tensor = self.passes.store.take(name, i)
            return lambda: levels.reduce(tensor, root)

        def deliver(i: int, tensor: Tensor) -> None:
            if at_root:
                self.passes.store.put(result, i, tensor.view(shape(i)))

        return _Collective(prepare, deliver)

    def _put(self, name: str) -> Callable[[int, Any], None]:
        """Return a function that puts a result into the store as ``name``."""
        return lambda i, result: self.passes.store.put(name, i, result)

    def _combine(
        self, name: str, operation: collectives.Operation
    ) -> Callable[[int], Callable[[Moved], Tensor]]:
        """Return the work that combines ``name``, a tensor in S's state, over all ranks."""

        def prepare(i: int) -> Callable[[Moved], Tensor]:
            # A copy, because the collective overwrites its tensor and T reads the state.
            tensor = getattr(self.passes.store.get("state", i), name).clone()
            return lambda _: self._levels.combine(tensor, operation)

        return prepare

    def _gather_statistics(self, i: int) -> Callable[[Moved], Merged]:
        """Gather and merge the statistics of all shards.

        One all-gather over the pipeline ranks moves all statistics: 4 p fp32 vectors of length n.
        Before it, an all-gather over the tensor-parallel ranks moves 4 t vectors. This is less
        traffic than one more activation as long as p is well below h / 8. The all-gather also
        replaces three collectives in a row, and so saves two latencies.
        """
        passes, state = self.passes, self.passes.store.get("state", i)

        def work(moved: Moved) -> Merged:
            own = state.statistics_4n
            merge = partial(passes.merge, i, state)
            merged, moved["gradient"] = self._levels.merge(own, merge_some_statistics, merge)
            return merged

        return work

    def _gradient(self) -> _Part:
        """Return how the output layer's input gradient is summed and brought to the last stage."""
        in_t = self._plan.treatment.gradient_pass == "T"
        own_part = self._gradient_from_t if in_t else self._gradient_from_s
        at_last = self._groups.pipeline.rank == self._last

        def prepare(i: int) -> Callable[[Moved], Tensor | None]:
            own = own_part(i)

            def work(moved: Moved) -> Tensor | None:
                gradient_nh = own(moved)
                if gradient_nh is None:
                    return None
                gradient_nh = self._levels.reduce(gradient_nh, self._last)
                # On other ranks the values mean nothing, and would stay in memory until the wait.
                return gradient_nh if at_last else None

            return work

        def deliver(i: int, gradient_nh: Tensor | None) -> None:
            if gradient_nh is not None:
                self.passes.store.put("output_gradient", i, gradient_nh, self._last_stage)

        return _Part(prepare, deliver)

    def _gradient_from_t(self, i: int) -> Callable[[Moved], Tensor]:
        """Take this rank's part of the gradient, which T has finished."""
        gradient_nh: Tensor = self.passes.store.take("partial_gradient", i)
        return lambda _: gradient_nh

    def _gradient_from_s(self, i: int) -> Callable[[Moved], Tensor | None]:
        """Take this rank's part of the gradient, which the merge of statistics has finished.

        An evaluation has no gradient.
        """
        state = self.passes.store.get("state", i)

        def finish(moved: Moved) -> Tensor | None:
            gradient_nh: Tensor | None = moved["gradient"]
            state.drop_gradient()  # frees memory now: the delivery may wait until just before T
            return gradient_nh

        return finish


def _chain(barrier: Barrier, parts: Mapping[Payload, _Part]) -> _Collective:
    """Return the collective that moves the payloads of ``barrier``, one after the other."""

    def prepare(i: int) -> Callable[[], list[object]]:
        moves = {payload: parts[payload].prepare(i) for payload in barrier.carries}

        def work() -> list[object]:
            moved: dict[Payload, object] = {}
            # In their order: C1 scales the gradient by the statistics that it has just merged.
            for payload, move in moves.items():
                moved[payload] = move(moved)
            return [moved[payload] for payload in moves]

        return work

    def deliver(i: int, results: list[object]) -> None:
        for payload, result in zip(barrier.carries, results, strict=True):
            parts[payload].deliver(i, result)

    return _Collective(prepare, deliver)
