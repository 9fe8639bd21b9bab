"""The setups of arXiv 2411.05288, tables 5 and 6: measured values, and the runs to predict.

256k stands for 256,000, as in the runs that the paper's authors published.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tools.predictions.counted_layer import Shape
from tools.predictions.measured import METHODS
from tools.predictions.vocabulary_runs import VocabularyRun

MEASURED = "a100_8gpu_seq2048.csv"
TABLES = {"1f1b": "paper_table5_1f1b.csv", "v-half": "paper_table6_vhalf.csv"}

# GPUs -> layers, hidden size, heads (arXiv 2411.05288, section 6).
MODELS = {
    "1f1b": {8: (32, 3072, 24), 16: (48, 4096, 32), 32: (64, 5120, 40)},
    "v-half": {16: (32, 4096, 32), 24: (48, 5120, 40), 32: (64, 6144, 48)},
}
VOCABULARIES = {"32k": 32000, "64k": 64000, "128k": 128000, "256k": 256000}
MICROBATCHES = 128

GIBIBYTE = 1 << 30


@dataclass(frozen=True)
class Cell:
    """A cell of the paper's tables.

    Attributes:
        schedule: schedule of the whole table.
        gpus: pipeline ranks.
        seq_length: tokens of a sequence.
        method: treatment of the vocabulary, as the paper writes it.
        vocabulary: its size, as in ``VOCABULARIES``.
        mfu: percent, ``None`` where the run did not fit.
        peak_gib: memory of the fullest rank.
    """

    schedule: str
    gpus: int
    seq_length: int
    method: str
    vocabulary: str
    mfu: float | None
    peak_gib: float | None

    @cached_property
    def counted(self) -> VocabularyRun:
        """The same run from the counts of its passes.

        Passes follow the order of the block, except in V-Half with vocabulary passes, where they
        fill idle time: in the order of the block its MFU would be far below the measured one.
        """
        layers, hidden, heads = MODELS[self.schedule][self.gpus]
        treatment = METHODS[self.method.lower()]
        return VocabularyRun(
            Shape(hidden, heads, self.seq_length, VOCABULARIES[self.vocabulary], dropout=True),
            layers,
            self.gpus,
            MICROBATCHES,
            self.schedule,
            treatment,
            shortened=self.schedule == "v-half" and treatment != "none",
        )


def read_cells(schedule: str, path: Path) -> list[Cell]:
    """Read one of the paper's tables.

    Raises:
        ValueError: if the file cannot be read or is no such table, naming its line and column.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            return [cell for row in reader for cell in _cells(schedule, row)]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error


def _cells(schedule: str, row: Mapping[str, str | None]) -> Iterator[Cell]:
    gpus, seq_length = int(_number(row, "gpus")), int(_number(row, "seq_length"))
    method = row.get("method") or ""
    if gpus not in MODELS[schedule]:
        known = ", ".join(map(str, MODELS[schedule]))
        raise ValueError(f"column gpus: '{gpus}' is none of {known}")
    if method.lower() not in METHODS:
        raise ValueError(f"column method: '{method}' is none of {', '.join(METHODS)}")
    for name in VOCABULARIES:
        mfu, peak = (
            None if row.get(column) == "-" else _number(row, column)
            for column in (f"mfu_{name}", f"peak_gb_{name}")
        )
        yield Cell(schedule, gpus, seq_length, method, name, mfu, peak)


def _number(row: Mapping[str, str | None], column: str) -> float:
    text = row.get(column)
    if text is None:
        raise ValueError(f"no column {column}")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"column {column}: '{text}' is no number") from None
