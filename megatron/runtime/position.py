"""How far a rank has come: written by the training thread, read by other threads at any time.

The executor writes one attribute per instruction, and on CUDA it marks in the GPU's stream that the
instruction was issued. All other facts are derived when they are asked for, which is rare.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from megatron.runtime.device_progress import DeviceProgress
from megatron.schedules.lower import Instruction, Program, Run, Wait
from megatron.schedules.needs import Comm
from megatron.schedules.passes import Pass

END_OF_SAVE: Final = "the end of a save"
"""The phase of a rank that waits until its part of a checkpoint is written."""


class Position:
    """The place of one rank in its run.

    Attributes:
        phase: what the rank does, in words, as in ``iteration 12``.
        may_last: whether the phase, such as a save, may take long without visible ``progress``.
        program: the program that runs, or ran last; ``None`` before the first.
        row: this rank's row of the program.
        at: index of the current instruction in the row; the row's length when all are done.
        programs: programs begun so far.
        device: how far the rank's GPU is; ``None``: the rank computes on its host.
    """

    def __init__(self, device: DeviceProgress | None = None) -> None:
        self.device = device
        self.phase = "the start"
        self.may_last = True
        self.program: Program | None = None
        self.row: tuple[Instruction, ...] = ()
        self.at = 0
        self.programs = 0

    def begin(self, program: Program, rank: int) -> tuple[Instruction, ...]:
        """Note that ``rank`` begins its row of ``program``; return the row."""
        self.at = 0
        self.program, self.row = program, program.rows[rank]
        self.programs += 1
        if self.device is not None:
            self.device.begin(program, self.row, self.programs)
        return self.row

    def issued(self) -> None:
        """Note that the host has issued the current instruction, a pass or a wait."""
        if self.device is not None:
            self.device.issued(self.at)

    def enter(self, phase: str, *, may_last: bool = False) -> None:
        """Begin a phase. The class describes the arguments, as attributes of the same names."""
        self.phase, self.may_last = phase, may_last

    @contextmanager
    def within(self, phase: str, *, may_last: bool = False) -> Iterator[None]:
        """Return a context that is a phase; its end goes back to the phase before.

        The class describes the arguments, as attributes of the same names.
        """
        before = self.phase, self.may_last
        self.enter(phase, may_last=may_last)
        try:
            yield
        finally:
            self.phase, self.may_last = before

    @property
    def progress(self) -> tuple[object, ...]:
        """A value that changes with every instruction and every phase."""
        return self.programs, self.at, self.phase

    @property
    def instruction(self) -> Instruction | None:
        """The instruction that is carried out; ``None`` outside of a program."""
        row, at = self.row, self.at  # read once, because another thread may change them
        return row[at] if at < len(row) else None


def awaited_in(step: Instruction | None) -> Comm | None:
    """Return the communication for which an instruction waits, if any."""
    return step.comm if isinstance(step, Wait) else None


def last_pass_of(done: Sequence[Instruction]) -> Pass | None:
    """Return the last pass of some instructions, if there is one."""
    return next((step.passes[-1] for step in reversed(done) if isinstance(step, Run)), None)
