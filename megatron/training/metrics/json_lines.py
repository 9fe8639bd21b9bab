"""Records as JSON lines, which every program can read: ``--log-jsonl``.

Every line is an object with the name of its event, the id of the run, and the record's values.
The first line of every start has the configuration. A line is written with one system call, so a
reader sees whole lines. A process that is killed leaves at most one line cut off; that line is
removed when the run goes on.
"""

import json
import math
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from megatron.training.metrics.records import (
    Ended,
    Evaluation,
    Generated,
    Interval,
    Record,
    Sink,
    Started,
)

EVENTS: Final = {
    Started: "start",
    Interval: "iterations",
    Evaluation: "evaluation",
    Generated: "generation",
    Ended: "end",
}
"""Names of the events that are written; other records have no line."""


class JsonLines(Sink):
    """Appends to a file.

    The folder of the file must exist.
    """

    wants_ranks = True

    def __init__(self, path: Path) -> None:
        self.name = f"--log-jsonl {path}"
        self._path = path
        self._run = ""

    def write(self, record: Record) -> None:
        """Append a line; a failure leaves the file as it was."""
        event = EVENTS.get(type(record))
        if event is None:
            return
        if isinstance(record, Started):
            self._begin(record)
        values = {"event": event, "run": self._run, **_object(record)}
        _append(self._path, f"{json.dumps(values, allow_nan=False)}\n".encode())

    def _begin(self, record: Started) -> None:
        """Make an id of the run; a run that goes on keeps the id in the file's last line."""
        self._run = f"{record.time:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        if self._path.is_file():
            earlier = _mend(self._path)
            if record.iteration > 0 and earlier:
                self._run = str(json.loads(earlier[-1]).get("run", self._run))


def check_json_lines(path: Path) -> None:
    """Refuse a file that holds something else than records, before anything is appended to it.

    Raises:
        ValueError: the file is refused; the message names the flag, the file and the way out.
        OSError: the file cannot be read.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        first = file.readline()
    try:
        is_ours = json.loads(first)["event"] == EVENTS[Started]
    except (ValueError, TypeError, KeyError):
        is_ours = False
    if not is_ours:
        raise ValueError(
            f"--log-jsonl {path}: the file holds something else than the records of a run, which "
            "would be appended to it: give another file"
        )


def _append(path: Path, line: bytes) -> None:
    """Append ``line`` or nothing.

    Raises:
        OSError: nothing was appended.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        before = os.fstat(file).st_size
        written = 0
        try:
            while written < len(line):
                written += os.write(file, line[written:])
        except OSError:
            if written:
                with suppress(OSError):
                    os.ftruncate(file, before)
            raise
    finally:
        os.close(file)


def _mend(path: Path) -> list[bytes]:
    """Remove an unfinished last line from the file; return the whole lines."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return content[:whole].splitlines()


def _object(record: object) -> dict[str, Any]:
    assert is_dataclass(record)
    return {field.name: plain(getattr(record, field.name)) for field in fields(record)}


def plain(value: object) -> Any:
    """Return a value in types that JSON has.

    A number that is not finite becomes ``None``, because JSON knows no such number. A path, a type
    or another value without a form in JSON becomes text.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if is_dataclass(value):
        return _object(value)
    return str(value)
