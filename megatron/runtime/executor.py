"""Executes one rank's row of a program, without knowing which schedule it runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final

from megatron.parallel.lanes import Pending
from megatron.parallel.turns import Turns
from megatron.parallel.waits import Waits
from megatron.runtime.communicator import Communicator
from megatron.runtime.observer import Began, Observer
from megatron.runtime.offload import HostCopies
from megatron.runtime.position import Position
from megatron.runtime.rank_passes import Passes
from megatron.runtime.replica_work import ReplicaWork
from megatron.schedules.lower import Program, Run, Start, Wait
from megatron.schedules.needs import HOST_KINDS, REPLICA_KINDS, Comm
from megatron.schedules.passes import BEGINNERS, PAUSING, Pass

BEFORE_GRADIENTS: Final = ("U", "IF", "F", "R", "S", "E")
"""Kinds of passes that add to no gradient; every other kind may add to one."""

Gate = Callable[[], bool]
"""Asked before a rank's first pass that changes gradients; ``False`` abandons the iteration."""


class Executor:
    """Executes programs on one rank.

    Args:
        passes: a method for every kind of pass.
        communicator: issues communications and waits for them.
        placeholder: replaces ``passes`` when an iteration is abandoned. It computes nothing, but
            leaves the tensors that the other ranks wait for. Only a run with a gate needs a
            placeholder.
        replicas: the work with the replicas, for programs that include such work.
        position: gets the index of every instruction.
        turns: lets the two passes of a pair take turns; ``None``: one runs after the other.
        host: the copies to and from the host, for programs that include such copies.
        waits: of passes, for collectives of their own.
    """

    def __init__(
        self,
        passes: Passes,
        communicator: Communicator,
        placeholder: Passes | None = None,
        replicas: ReplicaWork | None = None,
        position: Position | None = None,
        turns: Turns | None = None,
        host: HostCopies | None = None,
        waits: Waits | None = None,
    ) -> None:
        self._waits = Waits() if waits is None else waits
        self._passes = passes
        self._turns = turns
        self._communicator = communicator
        self._placeholder = placeholder
        self._replicas = replicas
        self._host = host
        self._position = Position() if position is None else position

    def run(
        self, program: Program, recorder: Observer | None = None, gate: Gate | None = None
    ) -> bool:
        """Execute this rank's row of ``program``, recording it if asked.

        Args:
            program: the same on every rank.
            recorder: records passes, collectives and waits, also those within passes.
            gate: must give the same answer on every rank. After ``False`` nothing more is computed,
                and no gradient is reduced. All other communication still takes place, so that no
                rank waits for ever.

        Returns:
            ``True`` if the program was carried out, ``False`` if it was abandoned.
        """
        # The communicator still has the placeholder if the iteration before was abandoned.
        self._communicator.passes = passes = self._passes
        self._communicator.recorder = recorder
        self._waits.observe = None if recorder is None else recorder.within
        carried_out = True
        under_way: dict[Comm, Pending[object]] = {}
        position = self._position
        for at, step in enumerate(position.begin(program, passes.rank)):
            position.at = at
            if not isinstance(step, Run):
                if carried_out or _ends_well(step, under_way):
                    self._communicate(step, under_way, recorder)
                    if isinstance(step, Wait):
                        position.issued()
            else:
                # The last pass of a pair is no F, and adds to gradients if any of the two does.
                if gate is not None and step.passes[-1].kind not in BEFORE_GRADIENTS:
                    carried_out = gate()
                    gate = None
                    if not carried_out:
                        passes = self._abandon()
                self._run_step(passes, step, recorder)
                position.issued()
        position.at = len(position.row)
        self._waits.observe = None
        assert not under_way, f"never waited for {', '.join(map(str, under_way))}"
        return carried_out

    def _run_step(self, passes: Passes, step: Run, recorder: Observer | None) -> None:
        """Run a pass, or the two passes of a pair.

        Unless the plan has turns for a pair, the kind of pass that stands first in ``BEGINNERS``
        begins.
        """
        if step.joined is not None and self._turns is not None:
            order = sorted(step.passes, key=lambda item: BEGINNERS.index(item.kind))
            if step.turns is not None and step.turns.begins != order[0].kind:
                order.reverse()
            with _recorded_pair(recorder, step.item, step.joined) as began:
                self._turns.run(
                    *(partial(self._run, passes, item) for item in order),
                    pauses=all(item.kind in PAUSING for item in step.passes),
                    pieces=() if step.turns is None else step.turns.pieces,
                    began=None if began is None else lambda own: began(order[own]),
                )
            return
        for item in step.passes:
            with _recorded(recorder, item):
                self._run(passes, item)

    def _run(self, passes: Passes, item: Pass) -> None:
        if item.kind != "U":
            passes.table[item.kind](item)
            return
        assert self._replicas is not None, f"{item} without replicas"
        self._replicas.update(item.microbatch)

    def _communicate(
        self, step: Start | Wait, under_way: dict[Comm, Pending[object]], recorder: Observer | None
    ) -> None:
        """Issue a communication, or wait for it; ``under_way`` has the issued communications."""
        comm = step.comm
        if isinstance(step, Start):
            under_way[comm] = self._start(comm, recorder)
            return
        with _recorded(recorder, comm):
            if comm.kind in REPLICA_KINDS:
                # Nothing to deliver: the sums and the weights already stand in the buckets.
                under_way.pop(comm).wait()
            elif comm.kind in HOST_KINDS:
                self._copies.finish(comm, under_way.pop(comm))
            else:
                self._communicator.finish(comm, under_way.pop(comm))

    @property
    def _copies(self) -> HostCopies:
        assert self._host is not None, "activations move without a host"
        return self._host

    def _start(self, comm: Comm, recorder: Observer | None) -> Pending[object]:
        if comm.kind in HOST_KINDS:
            return self._copies.start(comm, recorder)
        if comm.kind not in REPLICA_KINDS:
            return self._communicator.start(comm)
        assert self._replicas is not None, f"{comm} without replicas"
        return self._replicas.start(comm, recorder)

    def _abandon(self) -> Passes:
        assert self._placeholder is not None, "a gate needs passes to carry on with"
        self._communicator.passes = self._placeholder
        return self._placeholder


def _ends_well(step: Start | Wait, under_way: dict[Comm, Pending[object]]) -> bool:
    """Return whether an abandoned iteration still needs a step of a communication.

    Other ranks wait for all but the sums of gradients. Nobody reads activations any more, so no
    copy to or from the host begins.
    """
    if step.comm.kind in HOST_KINDS:
        return isinstance(step, Wait) and step.comm in under_way
    return step.comm.kind != "RG"


def _recorded(recorder: Observer | None, item: Pass | Comm) -> AbstractContextManager[None]:
    """Return a context that records a pass, or the wait for a communication."""
    if recorder is None:
        return nullcontext()
    return recorder.span(item) if isinstance(item, Pass) else recorder.waiting(item)


def _recorded_pair(
    recorder: Observer | None, first: Pass, second: Pass
) -> AbstractContextManager[Began | None]:
    """Return a context that records a pair; it gives a function that is told of turns."""
    return nullcontext() if recorder is None else recorder.pair(first, second)
