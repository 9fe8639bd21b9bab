"""Tables of measured runs, made up: times are round numbers that grow as real ones do."""

from collections.abc import Iterable, Sequence

from megatron.schedules.treatments import TREATMENTS
from tools.predictions.measured import METHODS, MeasuredRun

LAYERS = 4
COLUMNS = ("F", "B", "ST", "IF", "IB", "p2p")
FORWARD, BACKWARD, HOP = 10_000.0, 20_000.0, 240.0
FORWARD_OF_ENTRY, BACKWARD_OF_ENTRY = 0.1, 0.125
"""Microseconds: of a stage's passes and a message, and of a whole output layer by V."""


def run(method: str, vocab_size: int, ranks: int = 8, iteration_ms: float = 1.0) -> MeasuredRun:
    """A run with 4 layers a stage."""
    forward, backward = [FORWARD] * ranks, [BACKWARD] * ranks
    split = TREATMENTS[METHODS[method]].is_sharded
    output = (FORWARD_OF_ENTRY + BACKWARD_OF_ENTRY) * vocab_size
    if not split:
        forward[-1] += FORWARD_OF_ENTRY * vocab_size
        backward[-1] += BACKWARD_OF_ENTRY * vocab_size
    columns = {
        "F": forward,
        "B": backward,
        "ST": [split * (output / ranks + 800.0)] * ranks,
        "IF": [split * 400.0] * ranks,
        "IB": [split * 600.0] * ranks,
        "p2p": [HOP] * ranks,
    }
    measured = {name: tuple(values) for name, values in columns.items()}
    return MeasuredRun(method, 2048, vocab_size, LAYERS, measured, iteration_ms)


def as_csv(runs: Iterable[MeasuredRun]) -> str:
    """The text of the file that holds ``runs``."""
    names = ["method", "seq_length", "vocab_size", "layers_on_last_stage"]
    lines = [",".join([*names, *(f"{column}_us" for column in COLUMNS), "iteration_ms"])]
    for one in runs:
        cells: Sequence[object] = [
            one.method,
            one.seq_length,
            one.vocab_size,
            one.layers_on_last_stage,
            *(" ".join(map(repr, one.times[column])) for column in COLUMNS),
            one.iteration_ms,
        ]
        lines.append(",".join(map(str, cells)))
    return "\n".join(lines) + "\n"
