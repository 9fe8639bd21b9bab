"""Hostile checkpoints of strangers: nothing of their pickles runs, and none takes all memory.

What our own checkpoints do when they are tampered with, ``training/test_mutated_checkpoints.py``
shows. Here the files are Megatron-Core's, which come from elsewhere and have no digests.
"""

import argparse
import io
import pickle
import random
import resource
import struct
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest
from harness.damage import DAMAGES, within

from megatron.checkpoint.foreign.core_reader import CoreReader
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.checkpoint.foreign.megatron_core import COMMON, arguments
from megatron.checkpoint.metadata import METADATA

COUNT: Final = 30
PATIENCE: Final = 60
"""Seconds for a file; it takes some hundredths of one."""
MEMORY: Final = 256 << 10
"""Kilobytes by which a file may make the process grow."""

MARK: Final = "executed"
CALLS: Final = (
    *("os system", "posix system", "builtins eval", "builtins exec", "subprocess getoutput"),
    *("torch load", "torch.jit load", "pathlib Path.touch", "pty spawn", "pydoc pipepager"),
    *(
        "argparse Namespace.__class__",
        "collections OrderedDict.__init__",
        "torch float32.__class__",
    ),
)
"""Modules with names in them that a pickle may ask for."""


def calling(name: str, argument: str) -> bytes:
    """Return a pickle that calls a function, in one of the ways that pickles have."""
    module, function = name.split()
    word = pickle.dumps(argument, 2)[2:-1]
    asked = f"c{module}\n{function}\n".encode()
    stacked = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in name.split())
    ways = (
        b"\x80\x02" + asked + word + b"\x85R.",
        b"\x80\x04" + stacked + b"\x93" + word + b"\x85R.",
        b"\x80\x02(" + word + f"i{module}\n{function}\n.".encode(),
        b"\x80\x02(" + asked + word + b"o.",
        b"\x80\x02" + asked + word + b"\x85\x81.",
        b"\x80\x02" + asked + b")\x81}" + word + b"Nsb.",
    )
    return ways[len(argument) % len(ways)]


def odd(dice: random.Random) -> bytes:
    """Return a pickle that calls nothing, and is none of a checkpoint."""
    return dice.choice(
        (
            b"\x80\x02Nr\xff\xff\xff\x7f.",
            b"\x80\x02}r\xff\xff\xff\xff.",
            b"Np2147483647\n.",
            b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
            b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"N.",
            b"\x80\x02\x8b\xff\xff\xff\x7f.",
            b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
            b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
            b"\x80\x02X\xff\xff\xff\x7fabc.",
            b"I" + b"9" * 100_000 + b"\n.",
            b"\x80\x02}(X\x04\x00\x00\x00argsK\x01u.",
            b"",
        )
    )


def content_of(dice: random.Random, folder: Path) -> bytes:
    """Return a pickle that nobody should read as a checkpoint's."""
    mark = str(folder / MARK) + " " * dice.randrange(6)
    if dice.random() < 0.6:
        return calling(dice.choice(CALLS), dice.choice((f"touch {mark}", mark)))
    if dice.random() < 0.6:
        return odd(dice)
    sound = pickle.dumps({"args": argparse.Namespace(num_layers=2)}, dice.randrange(6))
    how = dice.choice([damage for damage in DAMAGES if damage is not None])
    return how(sound, b"other", dice)


def archive_of(content: bytes, dice: random.Random) -> bytes:
    """Return an archive as ``torch.save`` writes it, perhaps with more in it."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{dice.choice(('common', '..', 'a/../b', ''))}/data.pkl", content)
        archive.writestr("common/version", "3")
        if dice.random() < 0.2:
            archive.writestr("common/code/__torch__.py", "import os")
    return made.getvalue()


@pytest.mark.parametrize("number", range(COUNT))
def test_a_pickle_is_read_without_running_anything_or_refused(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dice, where = random.Random(number), tmp_path / "core"
    where.mkdir()
    content = content_of(dice, tmp_path)
    (where / COMMON).write_bytes(archive_of(content, dice))
    (where / METADATA).write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with within(PATIENCE):
        told = [refusal_of(arguments, where), refusal_of(CoreReader, where)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + MEMORY
    assert not list(tmp_path.rglob(f"{MARK}*")), content[:200]
    assert "cannot be read" in told[1]
    for file, message in zip((COMMON, METADATA), told, strict=True):
        assert not message or str(where / file) in message
        assert len(message) < 1000 + 2 * len(str(tmp_path))


def test_an_object_with_an_endless_number_is_refused(tmp_path: Path) -> None:
    """Read as it is, its ten bytes would take 2 GB."""
    content = b"\x80\x02Nr\xff\xff\xff\x07."
    (tmp_path / COMMON).write_bytes(archive_of(content, random.Random(0)))
    (tmp_path / METADATA).write_bytes(content)
    for read in (arguments, CoreReader):
        assert "9 bytes and an object with number 134217727" in refusal_of(read, tmp_path)


def refusal_of(read: Any, where: Path) -> str:
    """Return the message with which a checkpoint is refused; empty if it is read."""
    try:
        read(where)
    except ForeignError as error:
        return str(error)
    return ""
