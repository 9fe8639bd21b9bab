"""Damages files: cut short, bits turned over, halves swapped, emptied, exchanged, or missing.

The damage follows from the dice, so a failure is found again by its number.
"""

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

Damage = Callable[[bytes, bytes, random.Random], bytes]
"""From the content of a file, that of another one, and dice to the damaged content."""


def cut(content: bytes, other: bytes, dice: random.Random) -> bytes:
    return content[: dice.randrange(len(content))]


def flip(content: bytes, other: bytes, dice: random.Random) -> bytes:
    made = bytearray(content)
    for _ in range(dice.choice((1, 1, 3, 20))):
        made[dice.randrange(len(made))] ^= 1 << dice.randrange(8)
    return bytes(made)


def swap(content: bytes, other: bytes, dice: random.Random) -> bytes:
    middle = dice.randrange(len(content))
    return content[middle:] + content[:middle]


def repeat(content: bytes, other: bytes, dice: random.Random) -> bytes:
    begin = dice.randrange(len(content))
    return content + content[begin : begin + dice.randrange(1, 50)]


def zero(content: bytes, other: bytes, dice: random.Random) -> bytes:
    begin = dice.randrange(len(content))
    return content[:begin] + b"\0" * len(content[begin : begin + 40]) + content[begin + 40 :]


def exchange(content: bytes, other: bytes, dice: random.Random) -> bytes:
    return other


def empty(content: bytes, other: bytes, dice: random.Random) -> bytes:
    return b""


DAMAGES: Final[tuple[Damage | None, ...]] = (
    *(cut, cut, flip, flip, flip, swap, repeat, zero, exchange, empty),
    None,
)
"""``None``: the file is missing."""


def damage(folder: Path, others: list[Path], dice: random.Random) -> str:
    """Damage a file of a folder; return what was done, in words."""
    victim = dice.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    how = dice.choice(DAMAGES)
    if how is None:
        victim.unlink()
        return f"{victim.name} removed"
    victim.write_bytes(how(victim.read_bytes(), dice.choice(others).read_bytes(), dice))
    return f"{how.__name__} {victim.name}"


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise ``TimeoutError`` in the main thread if what is inside takes longer."""

    def late(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
