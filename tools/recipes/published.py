"""Published iterations to compare recipes with: rows of docs/reference/published_2026.csv."""

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

TABLE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "published_2026.csv"

ROWS: Final[Mapping[str, Sequence[int]]] = {
    "llama3-8b-128k.8xH100": (1326,),
    "llama3-70b.64xH100": (1336, 1397),
    "qwen3-30b-a3b.64xH100": (1394,),
    "gpt-oss-120b.64xH100": (1396,),
}
"""For the name of a recipe, the rows with its model in 16 bits on GPUs of its kind, by their id."""


class PublishedRow(NamedTuple):
    """A measured iteration of another program.

    Attributes:
        origin: the program and its version.
        gpus: number of GPUs.
        gpu: their kind.
        layout: its ranks.
        samples: of an iteration.
        seq_length: tokens of a sample.
        seconds: of an iteration.
        tokens: tokens a second on each GPU.
        source: address of the publication.
    """

    origin: str
    gpus: int
    gpu: str
    layout: str
    samples: int
    seq_length: int
    seconds: float
    tokens: float
    source: str


def published_rows(recipe: str) -> list[PublishedRow]:
    """Return the published iterations of a recipe's model on GPUs of its kind."""
    return [_row(_table()[number]) for number in ROWS.get(recipe, ())]


@cache
def _table() -> Mapping[int, Mapping[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {int(row["id"]): row for row in csv.DictReader(file)}


def _row(row: Mapping[str, str]) -> PublishedRow:
    ranks = {"t": row["tp"], "p": row["pp"], "c": row["cp"], "d": row["dp"], "e": row["ep"]}
    return PublishedRow(
        row["origin"],
        int(row["gpus"]),
        row["hardware"],
        ", ".join(f"{letter} {size}" for letter, size in ranks.items() if size not in ("", "1")),
        int(row["global_batch"]),
        int(row["seq"]),
        float(row["step_time_s"]),
        float(row["tokens_per_s_per_gpu"]),
        row["source"],
    )
