"""The GPUs that a plan is asked for: ``64xH100``, ``8x8xH100`` or ``18x4xGB200``."""

import re
from dataclasses import dataclass
from typing import Final

from megatron.flags.ranges import RANKS, Range
from megatron.flags.readable import nearest
from megatron.simulator.costs.gpus import GPUS, Gpu

FORMS: Final = "64xH100, 8x8xH100 (8 machines of 8) or 18x4xGB200 (18 machines of 4)"
"""The forms of the word, as messages show them."""

_FORM: Final = re.compile(r"(?:(\d{1,6})x)?(\d{1,6})x([a-z].*)", re.IGNORECASE)


@dataclass(frozen=True)
class AskedGpus:
    """GPUs of one kind in equal machines.

    Attributes:
        machines: number of machines.
        per_machine: GPUs of a machine.
        gpu: the kind of GPU.
    """

    machines: int
    per_machine: int
    gpu: Gpu

    @property
    def count(self) -> int:
        """All GPUs."""
        return self.machines * self.per_machine

    def __str__(self) -> str:
        """The GPUs as a word, with their machines."""
        return f"{self.machines}x{self.per_machine}x{self.gpu.name}"


def gpus_of(word: str) -> AskedGpus:
    """Return the GPUs of a word, in upper or lower case.

    ``64xH100`` are machines of 8 GPUs, as machines with an H100 usually have, or one machine with
    fewer; ``18x4xGB200`` are 18 machines of 4, and so are ``72xGB200``.

    Raises:
        ValueError: the word has another form, the GPUs do not fill usual machines, or no GPU has
            this name. The message names the nearest name and the forms.
    """
    found = _FORM.fullmatch(word.strip())
    if found is None:
        raise ValueError(f"give the number of GPUs and their name, as {FORMS}")
    gpu = _named(found[3])
    if found[1] is None:
        machines, per_machine = _usual_machines(int(found[2]), gpu)
    else:
        machines, per_machine = int(found[1]), int(found[2])
    _check(machines * per_machine, RANKS, "GPUs")
    return AskedGpus(machines, per_machine, gpu)


def _named(name: str) -> Gpu:
    for known, gpu in GPUS.items():
        if known.lower() == name.lower():
            return gpu
    raise ValueError(
        f"{name} is no GPU that this program knows: {nearest(name, GPUS)}choose one of "
        f"{', '.join(GPUS)}, as {FORMS}"
    )


def _usual_machines(count: int, gpu: Gpu) -> tuple[int, int]:
    """Return as many usual machines as have ``count`` GPUs, and the GPUs of one of them."""
    size = gpu.machine
    if count <= size:
        return 1, count
    if count % size:
        fitting = max(part for part in range(1, size) if count % part == 0)
        raise ValueError(
            f"{count} GPUs do not fill machines of {size}: say how many are in a machine, "
            f"as {count // fitting}x{fitting}x{gpu.name}, or give a multiple of {size}"
        )
    return count // size, size


def _check(count: int, allowed: Range, what: str) -> None:
    if not allowed.contains(count):
        raise ValueError(f"{count} {what}: must be {allowed.words}")
