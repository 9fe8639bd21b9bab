"""The power of a GPU and the clock of its multiprocessors, read while a section measures.

A GPU under load lowers its clock to stay within its power, and every time depends on the clock. So
a report without both cannot be compared with another machine's, or with a job of hours.
"""

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NamedTuple

INTERVAL: Final = 0.5
"""Seconds between two readings."""

_FIELDS: Final = "power.draw,clocks.sm,power.limit,temperature.gpu"


class Reading(NamedTuple):
    """One reading.

    Attributes:
        second: seconds since the log began.
        watts: power.
        megahertz: clock of the multiprocessors.
        limit: most watts that the GPU may draw; 0: not known.
        celsius: temperature; 0: not known.
    """

    second: float
    watts: float
    megahertz: float
    limit: float
    celsius: float


@dataclass
class PowerLog:
    """A log of the first visible GPU, from the begin of a ``with`` to its end.

    Attributes:
        command: the driver's tool.
        readings: what it has said; empty if it is missing or has no such values.
    """

    command: str = "nvidia-smi"
    readings: list[Reading] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None
    _listener: threading.Thread | None = None

    def __enter__(self) -> "PowerLog":
        words = [self.command, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
        words += [f"--loop-ms={round(1e3 * INTERVAL)}", f"--id={_first_visible()}"]
        try:
            self._process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return self
        self._listener = threading.Thread(target=self._listen, args=(self._process,))
        self._listener.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is None or self._listener is None:
            return
        self._process.terminate()
        self._process.wait()
        self._listener.join()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        begin = time.monotonic()
        with process.stdout or open(os.devnull, encoding="utf-8") as lines:
            for line in lines:
                if found := _read(line, time.monotonic() - begin):
                    self.readings.append(found)


def _first_visible() -> str:
    """Return the first GPU that programs see, as the driver's tool takes it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"


def _read(line: str, second: float) -> Reading | None:
    """Return a reading; ``None``: the driver does not know the power or the clock."""
    values = [_number(word) for word in line.split(",")]
    if len(values) < 4 or values[0] is None or values[1] is None:
        return None
    return Reading(round(second, 2), values[0], values[1], values[2] or 0.0, values[3] or 0.0)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def in_words(readings: Sequence[Reading]) -> str:
    """Return a line of Markdown.

    *Busy* are the readings with at least half of the most watts: a section also compiles and waits.
    """
    if not readings:
        return "Power and clock: not known, because nvidia-smi did not say them."
    most = max(own.watts for own in readings)
    busy = [own for own in readings if own.watts >= most / 2]
    clocks = [own.megahertz for own in busy]
    limit = max(own.limit for own in readings)
    within = f" of {limit:.0f} W that it may draw" if limit else ""
    warmest = max(own.celsius for own in readings)
    at = f", at most {warmest:.0f} degrees Celsius" if warmest else ""
    mean = sum(own.watts for own in busy) / len(busy)
    return (
        f"Power while busy ({len(busy)} of {len(readings)} readings): {mean:.0f} W in the mean, "
        f"{most:.0f} W at most{within}{at}. Clock of the multiprocessors: "
        f"{sum(clocks) / len(clocks):.0f} MHz in the mean, {min(clocks):.0f} to {max(clocks):.0f}."
    )
