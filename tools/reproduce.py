#!/usr/bin/env python3
"""Predict real runs from their measured pass times, and compare with what they took.

python tools/reproduce.py docs/reference/a100_8gpu_seq2048.csv

The only inputs are pass times and the time of a hop; see tools/predictions/measured_runs.py.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
        share_of_s: share of ST that is S; by default that of its matrix products.
    """
    program, costs = lowered(run, hop, microbatches, share_of_s)
    return simulate(program, costs).end / 1000


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("file", type=Path, help="CSV, one run a row; see tools/predictions/measured.py")
    count = "of an iteration (default: %(default)s)"
    add("-m", "--microbatches", type=int, default=MICROBATCHES, help=count)
    share = "share of ST that is S, above 0 and below 1 (default: that of its matrix products)"
    add("--share-of-s", type=float, metavar="SHARE", help=share)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        ValueError: for a file that is no table of runs, or numbers out of range.
    """
    arguments = _parse_arguments(argv)
    share = arguments.share_of_s
    if share is not None and not 0 < share < 1:
        raise ValueError(f"--share-of-s {share:g}: give a share above 0 and below 1")
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
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
