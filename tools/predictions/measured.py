"""Pass times measured in real runs: a table with one run a row.

The columns are ``method seq_length vocab_size layers_on_last_stage F_us B_us ST_us IF_us IB_us
p2p_us iteration_ms``; those in ``_us`` hold one time for every rank, with spaces between. ST is T
of one microbatch with S of the next, which the measured code runs as one step. Vocabulary layers
that are not split are part of F and B. Other columns are ignored.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Final

from megatron.schedules.costs import Costs
from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import TREATMENTS, Treatment

METHODS: Final[Mapping[str, str]] = {
    "baseline": "none",
    "redis": "redis",
    "vocab-1": "vocab-1",
    "vocab-2": "vocab-2",
    "interlaced": "interlaced",
}
"""Treatment of the vocabulary by the name that the table has for it."""

_COUNTS: Final = ("seq_length", "vocab_size", "layers_on_last_stage")
_TIMES: Final = ("F_us", "B_us", "ST_us", "IF_us", "IB_us", "p2p_us")
_COLUMNS: Final = ("method", *_COUNTS, *_TIMES, "iteration_ms")


@dataclass(frozen=True)
class MeasuredRun:
    """One row: microseconds for every rank, and what the whole iteration took.

    Attributes:
        method: a name of ``METHODS``.
        seq_length: tokens of a sequence; a microbatch is one sequence.
        vocab_size: vocabulary entries.
        layers_on_last_stage: transformer layers of the last stage.
        times: by column without its ``_us``, one time for every rank.
        iteration_ms: measured time of an iteration.
    """

    method: str
    seq_length: int
    vocab_size: int
    layers_on_last_stage: int
    times: Mapping[str, tuple[float, ...]]
    iteration_ms: float

    @property
    def treatment(self) -> Treatment:
        """The treatment of the vocabulary layers."""
        return TREATMENTS[METHODS[self.method]]

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.times["F"])

    @property
    def hop(self) -> float:
        """Microseconds of one point-to-point message, 0 where it was not measured."""
        return mean(self.times["p2p"])

    def share_of_s(self) -> float:
        """Return the share of ST that is S, by its matrix products."""
        products = self.treatment.products
        return products["S"] / sum(products.values())

    def costs(self, hop: float, share_of_s: float | None = None) -> Costs:
        """Return the times of passes and of messages, in microseconds.

        Args:
            hop: microseconds of a message between neighbours.
            share_of_s: share of ST that is S, between 0 and 1; by default that of its products.
        """
        share = self.share_of_s() if share_of_s is None else share_of_s
        passes: dict[PassKind, Sequence[float]] = {"F": self.times["F"], "B": self.times["B"]}
        if self.treatment.is_sharded:
            passes |= {
                "S": [share * time for time in self.times["ST"]],
                "T": [(1 - share) * time for time in self.times["ST"]],
                "IF": self.times["IF"],
                "IB": self.times["IB"],
            }
        return Costs(passes, {"X": hop, "G": hop})


def hop_like(run: MeasuredRun, runs: Iterable[MeasuredRun]) -> float:
    """Return the microseconds of one of ``run``'s messages.

    If the run has no measured message, the result is the mean over runs with messages of the same
    length, or 0 if there are none.
    """
    if run.hop:
        return run.hop
    hops = [other.hop for other in runs if other.hop and other.seq_length == run.seq_length]
    return mean(hops) if hops else 0.0


def read_measured(path: Path) -> list[MeasuredRun]:
    """Read a table of measured runs.

    Raises:
        ValueError: if the file cannot be read or is no such table; the message names line, column
            and value.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(
                    f"{path}, line 1: no column {', '.join(missing)}: a table of measured runs has "
                    f"the columns {' '.join(_COLUMNS)}"
                )
            runs = [_run(_Cells(f"{path}, line {reader.line_num}", row)) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not runs:
        raise ValueError(f"{path} holds no run: give one a line below the header")
    return runs


@dataclass(frozen=True)
class _Cells:
    """A line of the table, with its file and number for messages."""

    where: str
    cells: Mapping[str, str | None]

    def text(self, column: str) -> str:
        value = self.cells[column]
        if value is None:
            raise ValueError(f"{self.where} ends before column {column}")
        return value.strip()

    def count(self, column: str) -> int:
        text = self.text(column)
        if not text.isdecimal():
            raise self.refuse(column, text, "a whole number, 0 or more")
        return int(text)

    def times(self, column: str) -> tuple[float, ...]:
        return tuple(self._time(column, word) for word in self.text(column).split())

    def refuse(self, column: str, value: str, wanted: str) -> ValueError:
        return ValueError(f"{self.where}, column {column}: '{value}' is not {wanted}")

    def _time(self, column: str, word: str) -> float:
        try:
            time = float(word)
        except ValueError:
            time = -1.0
        if not (isfinite(time) and time >= 0):
            raise self.refuse(column, word, "a time of 0 or more")
        return time


def _run(cells: _Cells) -> MeasuredRun:
    method = cells.text("method")
    if method not in METHODS:
        raise cells.refuse("method", method, f"one of {', '.join(METHODS)}")
    times = {column.removesuffix("_us"): cells.times(column) for column in _TIMES}
    ranks = len(times["F"])
    for column in _TIMES:
        if not ranks or len(times[column.removesuffix("_us")]) != ranks:
            wanted = (
                f"a time for each of the {ranks} ranks of F_us" if ranks else "a time for each rank"
            )
            raise cells.refuse(column, cells.text(column), wanted)
    counts = {column: cells.count(column) for column in _COUNTS}
    iteration = cells.times("iteration_ms")
    if len(iteration) != 1 or not iteration[0]:
        raise cells.refuse("iteration_ms", cells.text("iteration_ms"), "one time above 0")
    return MeasuredRun(method, times=times, iteration_ms=iteration[0], **counts)
