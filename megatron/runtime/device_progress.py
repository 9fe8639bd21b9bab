"""How far a GPU has come in its rank's programs, which the host issues ahead of it.

The executor records an event on the current stream behind every pass and behind every wait for a
communication. The first of these events that is not over is the place of the GPU. Events of the
program before stay, because its last passes may run when the host has begun the next program; of a
host that is two programs ahead the older place is not known. Nothing is asked of the GPU until
``place`` is called.

A driver may not answer: while a launch waits for room in the GPU's queue, other calls may wait too.
``torch.cuda.Event.query`` would keep Python's lock meanwhile, and all threads of the rank would
stop. So CUDA's own function is called by ``ctypes``, which lets go of the lock, and in a thread
that nobody waits for longer than ``PATIENCE``.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, Final, NamedTuple

import torch

from megatron.schedules.lower import Instruction, Program

PATIENCE: Final = 2.0
"""Seconds that a GPU's driver has to answer."""

_SUCCESS, _NOT_READY = 0, 600
"""Results of ``cudaEventQuery``: ``cudaSuccess`` and ``cudaErrorNotReady``."""


class DevicePlace(NamedTuple):
    """The place of a GPU that is behind its host.

    Attributes:
        program: the program that the GPU runs.
        row: the rank's row of the program.
        at: index of the instruction that the GPU has not finished.
        programs: programs begun until this one.
    """

    program: Program
    row: tuple[Instruction, ...]
    at: int
    programs: int


class DeviceError(Exception):
    """A GPU does not answer, or has failed; the message says which, in words."""


@dataclass
class _Walk:
    """A program on its way through the GPU.

    Attributes:
        program: the program.
        row: the rank's row of the program.
        programs: programs begun until this one.
        marks: the indices of instructions behind which an event stands, ascending.
        events: these events, in the same order; further ones are of an earlier program.
    """

    program: Program
    row: tuple[Instruction, ...]
    programs: int
    marks: list[int] = field(default_factory=list)
    events: list[torch.cuda.Event] = field(default_factory=list)

    def first_open(self, is_over: Callable[[torch.cuda.Event], bool]) -> int | None:
        """Return the index of the first instruction that the GPU has not finished, if any."""
        marks = list(self.marks)  # the training thread appends
        pairs = zip(marks, self.events, strict=False)
        return next((at for at, event in pairs if not is_over(event)), None)


class DeviceProgress:
    """The progress of one GPU: written by the training thread, read by others at any time.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now: _Walk | None = None
        self._before: _Walk | None = None

    def begin(self, program: Program, row: tuple[Instruction, ...], programs: int) -> None:
        """Note that the host begins a program; the class ``_Walk`` describes the arguments."""
        events = [] if self._before is None else self._before.events
        self._before, self._now = self._now, _Walk(program, row, programs, events=events)

    def issued(self, at: int) -> None:
        """Note that the host has issued the instruction with index ``at`` to the current stream."""
        walk = self._now
        assert walk is not None, "instructions belong to a program"
        count = len(walk.marks)
        if count == len(walk.events):
            walk.events.append(torch.cuda.Event())
        walk.events[count].record()
        walk.marks.append(at)

    def place(self) -> DevicePlace | None:
        """Return the place of the GPU; ``None`` if the GPU has finished all that it was given.

        Raises:
            DeviceError: the GPU has failed, or its driver does not answer.
        """
        answer: list[DevicePlace | DeviceError | None] = []
        asking = Thread(target=lambda: answer.append(self._ask()), daemon=True, name="GPU's place")
        asking.start()
        asking.join(PATIENCE)
        if not answer:
            raise DeviceError("the driver of its GPU does not answer")
        if isinstance(answer[0], DeviceError):
            raise answer[0]
        return answer[0]

    def _ask(self) -> DevicePlace | DeviceError | None:
        is_over = _asking(self._device)
        try:
            for walk in (self._before, self._now):
                at = None if walk is None else walk.first_open(is_over)
                if walk is not None and at is not None:
                    return DevicePlace(walk.program, walk.row, at, walk.programs)
        except RuntimeError as error:  # an earlier kernel has broken the device
            return DeviceError(f"its GPU has failed: {str(error).splitlines()[0]}")
        return None


def _asking(device: torch.device) -> Callable[[torch.cuda.Event], bool]:
    """Return a function that says in this thread whether an event on ``device`` is over."""
    runtime = _runtime()
    if runtime is None:  # the events are not CUDA's
        return lambda event: event.query()
    # A new thread begins with GPU 0, and would make a context there.
    runtime.cudaSetDevice(ctypes.c_int(device.index or 0))

    def is_over(event: torch.cuda.Event) -> bool:
        result = runtime.cudaEventQuery(ctypes.c_void_p(event.cuda_event))
        if result not in (_SUCCESS, _NOT_READY):
            raise RuntimeError(f"CUDA error {result}")
        return bool(result == _SUCCESS)

    return is_over


@cache
def _runtime() -> Any:
    """Return CUDA's runtime, as PyTorch has loaded it; ``None`` if it has loaded none."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # no Linux, and so no GPU of CUDA
        return None
    loaded = (line.split(maxsplit=5)[-1] for line in lines if "/libcudart" in line)
    path = next(loaded, None)
    return None if path is None else ctypes.CDLL(path)
