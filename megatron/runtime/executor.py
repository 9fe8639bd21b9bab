"""Walk one rank's row of a program. It does not know which schedule it runs."""

from megatron.parallel.lanes import Pending
from megatron.runtime.communicator import Communicator
from megatron.runtime.stage_passes import StagePasses
from megatron.runtime.timeline import Recorder
from megatron.schedules.lower import Program, Run, Start
from megatron.schedules.needs import Comm


class Executor:
    """Executes programs on one rank.

    Args:
        passes: a method for every kind of pass.
        communicator: issues communications and waits for them.
    """

    def __init__(self, passes: StagePasses, communicator: Communicator) -> None:
        self._passes = passes
        self._communicator = communicator

    def run(self, program: Program, recorder: Recorder | None = None) -> None:
        """Execute this rank's row of ``program``, recording it if asked."""
        table = self._passes.table
        under_way: dict[Comm, Pending[object]] = {}
        self._communicator.recorder = recorder
        for step in program.rows[self._passes.rank]:
            if isinstance(step, Start):
                under_way[step.comm] = self._communicator.start(step.comm)
            elif not isinstance(step, Run):
                self._communicator.finish(step.comm, under_way.pop(step.comm))
            elif recorder is None:
                table[step.item.kind](step.item)
            else:
                with recorder.span(step.item):
                    table[step.item.kind](step.item)
        assert not under_way, f"never waited for {', '.join(map(str, under_way))}"
