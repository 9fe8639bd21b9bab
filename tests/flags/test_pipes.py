"""A reader that leaves, such as ``head``, ends a command without a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TALKATIVE = """
import sys
from dataclasses import dataclass
from megatron.flags.command import read
from megatron.flags.declare import flag

@dataclass(frozen=True)
class LineFlags:
    '''Lines.'''

    lines: int = flag(1, "To print.")

for number in range(read(None, "Prints.", LineFlags)[LineFlags].lines):
    print(f"line {number}")
"""


def ended(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a standard output that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(
            [sys.executable, *words],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
            check=False,
        )
    finally:
        os.close(writing)


@pytest.mark.parametrize("lines", ["1", "100000"])
def test_output_without_a_reader_leaves_no_traceback(lines: str) -> None:
    """One line stays in Python's buffer until the end; many lines fail on the way."""
    done = ended("-c", TALKATIVE, "--lines", lines)
    assert done.stderr == ""
    assert done.returncode == (0 if lines == "1" else 1)


def test_other_failures_keep_their_traceback() -> None:
    done = ended("-c", f"{TALKATIVE}\nraise LookupError('a bug')")
    assert "LookupError: a bug" in done.stderr
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "pretrain_gpt.py",
        "tools/checkpoint.py",
        "tools/simulate.py",
        pytest.param("tools/generate.py", marks=pytest.mark.full),
        pytest.param("tools/preprocess_data.py", marks=pytest.mark.full),
    ],
)
def test_help_without_a_reader_ends_well(command: str) -> None:
    done = ended(str(ROOT / command), "--help")
    assert done.stderr == ""
    assert done.returncode in (0, -signal.SIGPIPE), "some commands let the system end them"
