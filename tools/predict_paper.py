#!/usr/bin/env python3
"""Predict the tables of arXiv 2411.05288 (MFU and peak memory) from a model, and compare.

python tools/predict_paper.py docs/reference --auto > tables.md

The rates of the device come from measured pass times of one model on 8 GPUs, and none of them from
the tables. Each line is a cell of the paper's tables. ``--auto`` adds the prediction for the
fastest of this project's schedules and treatments that fits the memory.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.schedules.catalogue import SCHEDULES
from megatron.simulator.costs.device import Device
from megatron.simulator.costs.shape import Shape
from tools.predictions.calibrate import Setting, calibrate
from tools.predictions.measured import METHODS, read_measured
from tools.predictions.predict import PipelineJob, best

MEASURED = "a100_8gpu_seq2048.csv"
TABLES = {"1f1b": "paper_table5_1f1b.csv", "v-half": "paper_table6_vhalf.csv"}

# GPUs -> layers, hidden size, heads (arXiv 2411.05288, section 6).
MODELS = {
    "1f1b": {8: (32, 3072, 24), 16: (48, 4096, 32), 32: (64, 5120, 40)},
    "v-half": {16: (32, 4096, 32), 24: (48, 5120, 40), 32: (64, 6144, 48)},
}
VOCABULARIES = {"32k": 32000, "64k": 64000, "128k": 128000, "256k": 256000}
MICROBATCHES = 128

# The A100's data sheet: dense fp16 products, and NVLink in one direction.
PEAK_FLOPS = 312e12
LINK_BANDWIDTH = 300e9
GIBIBYTE = 1 << 30

HEADING = ["schedule", "GPUs", "sequence", "method", "V", "MFU", "predicted", "error"]
HEADING += ["GiB", "predicted", "error"]
AUTO_HEADING = ["auto", "MFU", "GiB"]

Devices = Mapping[str, Device]


@dataclass(frozen=True)
class Cell:
    """A cell of the paper's tables.

    Attributes:
        schedule: that of the whole table.
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

    def job(
        self, schedule: str, treatment: str, devices: Devices, *, shortened: bool
    ) -> PipelineJob:
        """Return the cell's model with any schedule and treatment."""
        layers, hidden, heads = MODELS[self.schedule][self.gpus]
        shape = Shape(hidden, heads, self.seq_length, VOCABULARIES[self.vocabulary])
        device = devices[treatment]
        return PipelineJob(
            shape, layers, self.gpus, MICROBATCHES, device, schedule, treatment, shortened=shortened
        )

    def paper_job(self, devices: Devices) -> PipelineJob:
        """Return the job that the paper ran.

        Passes follow the order of the block, except in V-Half with vocabulary passes, where they
        fill idle time. In the order of our block its MFU would be far below the measured one,
        so the paper's plan had another order. docs/predictions.md says how much the choice changes.
        """
        treatment = METHODS[self.method.lower()]
        shortened = self.schedule == "v-half" and treatment != "none"
        return self.job(self.schedule, treatment, devices, shortened=shortened)


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


def measured_devices(path: Path) -> Devices:
    """Return what the 8 GPUs attained, for every treatment of the vocabulary that was measured."""
    layers, hidden, heads = MODELS["1f1b"][8]
    setting = Setting(
        lambda run: Shape(hidden, heads, run.seq_length, run.vocab_size),
        layers // 8,
        PEAK_FLOPS,
        LINK_BANDWIDTH,
    )
    devices = calibrate(read_measured(path), setting)
    return {**devices, "redis": devices["none"]}


def describe(devices: Devices) -> Iterator[str]:
    """Yield what the device attained under every treatment, a line each."""
    for treatment, device in devices.items():
        shares = ", ".join(f"{kind} {share:.3f}" for kind, share in device.attained.items())
        overhead = ", ".join(f"{kind} {1e6 * time:.0f}" for kind, time in device.overhead.items())
        yield (
            f"* {treatment}: products attain {shares} of the peak, elementwise kernels "
            f"{device.memory_bandwidth / 1e12:.2f} TB/s; overhead in us: {overhead}, "
            f"message {1e6 * device.link_latency:.0f}"
        )


def fastest(
    cell: Cell, devices: Devices, limit_gib: float, indifference: float = 0.0
) -> PipelineJob | None:
    """Return the fastest of all schedules and treatments for a cell's model and GPUs.

    A schedule that cannot be faster by the share ``indifference`` is skipped.
    """
    jobs = (
        cell.job(schedule, treatment, devices, shortened=True)
        for treatment in devices
        for schedule in SCHEDULES
    )
    return best(jobs, limit_gib * GIBIBYTE, indifference)


def line(cell: Cell, job: PipelineJob, auto: PipelineJob | None) -> str:
    """Return a cell's line of the report."""
    predicted, peak = 100 * job.forecast.mfu, job.peak / GIBIBYTE
    words = [cell.schedule, str(cell.gpus), str(cell.seq_length), cell.method, cell.vocabulary]
    if cell.mfu is None or cell.peak_gib is None:
        words += ["-", f"{predicted:.1f}", "", "-", f"{peak:.1f}", ""]
    else:
        words += [f"{cell.mfu:.1f}", f"{predicted:.1f}", f"{predicted - cell.mfu:+.1f}"]
        error = 100 * (peak / cell.peak_gib - 1)
        words += [f"{cell.peak_gib:.1f}", f"{peak:.1f}", f"{error:+.0f} %"]
    if auto is not None:
        words += [f"{auto.schedule}, {auto.vocabulary}", f"{100 * auto.forecast.mfu:.1f}"]
        words.append(f"{auto.peak / GIBIBYTE:.1f}")
    return f"| {' | '.join(words)} |"


def summary(cells: Sequence[Cell], jobs: Sequence[PipelineJob]) -> Iterator[str]:
    """Yield the mean errors of each table and of both, over the runs that fitted."""
    pairs = list(zip(cells, jobs, strict=True))
    for name, schedules in (*((s, (s,)) for s in TABLES), ("both tables", tuple(TABLES))):
        points, percent = [], []
        for cell, job in pairs:
            if cell.schedule in schedules and cell.mfu is not None and cell.peak_gib is not None:
                points.append(abs(100 * job.forecast.mfu - cell.mfu))
                percent.append(100 * abs(job.peak / GIBIBYTE / cell.peak_gib - 1))
        if points:
            yield (
                f"{name}: mean abs error {mean(points):.2f} MFU points (max {max(points):.1f}), "
                f"{mean(percent):.1f} % of memory (max {max(percent):.0f} %)"
            )


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("reference", type=Path, help=f"folder with {MEASURED}, {' and '.join(TABLES.values())}")
    add("--auto", action="store_true", help="also try all schedules and treatments")
    memory = "GiB that a device of --auto has (default: %(default)s, an A100 of 80 GB)"
    add("--memory", type=float, default=79.0, metavar="GIB", help=memory)
    within = "percent by which a further schedule must be able to be faster (default: %(default)s)"
    add("--within", type=float, default=1.0, metavar="PERCENT", help=within)
    add("--table", choices=list(TABLES), help="only this table")
    add("--gpus", type=int, help="only these setups")
    add("--seq-length", type=int, help="only these setups")
    add("--vocab-size", choices=list(VOCABULARIES), help="only these setups")
    return parser.parse_args(argv)


def _selected(arguments: argparse.Namespace) -> list[Cell]:
    wanted = {
        "schedule": arguments.table,
        "gpus": arguments.gpus,
        "seq_length": arguments.seq_length,
        "vocabulary": arguments.vocab_size,
    }
    cells = [
        cell
        for schedule, file in TABLES.items()
        for cell in read_cells(schedule, arguments.reference / file)
        if all(value in (None, getattr(cell, name)) for name, value in wanted.items())
    ]
    if not cells:
        raise ValueError("the tables have no such setup: ask for fewer at once")
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        ValueError: for files that are no such tables, or a selection that is empty.
    """
    arguments = _parse_arguments(argv)
    cells = _selected(arguments)
    devices = measured_devices(arguments.reference / MEASURED)

    @cache
    def auto(setup: tuple[str, int, int, str]) -> PipelineJob | None:
        cell = next(c for c in cells if _setup(c) == setup)
        return fastest(cell, devices, arguments.memory, arguments.within / 100)

    print(*describe(devices), "", sep="\n")
    heading = HEADING + (AUTO_HEADING if arguments.auto else [])
    print(f"| {' | '.join(heading)} |\n|{'---|' * len(heading)}")
    jobs = [cell.paper_job(devices) for cell in cells]
    for cell, job in zip(cells, jobs, strict=True):
        chosen = auto(_setup(cell)) if arguments.auto else None
        print(line(cell, job, chosen), flush=True)
    print("", *summary(cells, jobs), sep="\n")


def _setup(cell: Cell) -> tuple[str, int, int, str]:
    """Return the values that are equal for cells with the same model and GPUs."""
    return cell.schedule, cell.gpus, cell.seq_length, cell.vocabulary


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
