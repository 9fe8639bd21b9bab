#!/usr/bin/env python3
"""Predict real runs from their measured pass times, and compare with what they took.

python tools/reproduce.py docs/reference/a100_8gpu_seq2048.csv

The only inputs are pass times and the time of a hop; see tools/predictions/measured_runs.py.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.flags.command import read
from megatron.flags.declare import flag, positional
from megatron.flags.ranges import COUNT, Range
from megatron.flags.readable import told_as_error
from megatron.simulator.simulate import simulate
from tools.predictions.measured import MeasuredRun, hop_like, read_measured
from tools.predictions.measured_runs import MICROBATCHES, lowered


def predict(
    run: MeasuredRun, hop: float, microbatches: int, share_of_s: float | None = None
) -> float:
    """Return the simulated time of an iteration in milliseconds.

    Args:
        run: measured pass times.
        hop: microseconds of a message between neighbours.
        microbatches: microbatches of the iteration.
        share_of_s: share of ST that is S; by default the share of its matrix products.
    """
    program, costs = lowered(run, hop, microbatches, share_of_s)
    return simulate(program, costs).end / 1000


@dataclass(frozen=True)
class ReproduceFlags:
    """What is simulated."""

    file: Path = positional("CSV, one run a row; see tools/predictions/measured.py.", "FILE")
    microbatches: int = flag(MICROBATCHES, "Of an iteration.", COUNT, names=("-m",))
    share_of_s: float | None = flag(
        None,
        "Share of ST that is S.",
        Range(1e-6, 0.999999),
        unset="that of its matrix products",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        ValueError: for a file that is not a table of runs, or numbers out of range.
    """
    arguments = read(argv, __doc__, ReproduceFlags)[ReproduceFlags]
    share = arguments.share_of_s
    runs = read_measured(arguments.file)
    print("method     sequence   vocab predicted ms measured ms  error")
    errors = []
    for run in runs:
        time = predict(run, hop_like(run, runs), arguments.microbatches, share)
        errors.append(100 * (time / run.iteration_ms - 1))
        print(
            f"{run.method:<10} {run.seq_length:>8} {run.vocab_size:>7} {time:>12.0f} "
            f"{run.iteration_ms:>11.0f} {errors[-1]:>+6.2f}%"
        )
    print(f"mean abs error: {sum(map(abs, errors)) / len(errors):.2f} %")
    print(f"max abs error: {max(map(abs, errors)):.2f} %")


if __name__ == "__main__":
    with told_as_error(ValueError):
        main()
