#!/usr/bin/env python3
"""Predict the tables of arXiv 2411.05288 (MFU and peak memory) from a model, and compare.

python tools/predict_paper.py docs/reference --auto > tables.md

The rates of the device come from measured pass times of one model on 8 GPUs, and none of them from
the tables. Each line is a cell of the paper's tables. ``--auto`` adds the prediction for the
fastest of this project's schedules and treatments that fits the memory. ``--update`` writes the
lines into the page that has them, docs/predictions.md; the means at the end belong into
megatron/simulator/costs/accuracy.py.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.schedules.catalogue import SCHEDULES
from megatron.simulator.costs.accuracy import Errors, together
from tools.predictions.paper_tables import (
    GIBIBYTE,
    MEASURED,
    TABLES,
    VOCABULARIES,
    Cell,
    Devices,
    errors_of,
    measured_devices,
    read_cells,
)
from tools.predictions.predict import PipelineJob, best

HEADING = ["schedule", "GPUs", "sequence", "method", "V", "MFU", "predicted", "error"]
HEADING += ["GiB", "predicted", "error"]
AUTO_HEADING = ["auto", "MFU", "GiB"]


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
    """Yield the errors for every number of GPUs, for each table and for both."""
    by_setup: dict[str, list[Errors]] = {schedule: [] for schedule in TABLES}
    for schedule, gpus in dict.fromkeys((cell.schedule, cell.gpus) for cell in cells):
        own = [i for i, c in enumerate(cells) if (c.schedule, c.gpus) == (schedule, gpus)]
        found = errors_of([cells[i] for i in own], [jobs[i] for i in own])
        if found is not None:
            by_setup[schedule].append(found)
            yield f"{schedule}, {gpus} GPUs: {_in_words(found)}"
    for schedule, parts in by_setup.items():
        if parts:
            yield f"{schedule}: {_in_words(together(parts))}"
    if any(by_setup.values()):
        yield f"both tables: {_in_words(together(chain.from_iterable(by_setup.values())))}"


def _in_words(errors: Errors) -> str:
    return (
        f"{errors.runs} runs, mean abs error {errors.mfu:.2f} MFU points "
        f"(max {errors.most_mfu:.2f}), {errors.memory:.2f} % of memory "
        f"(max {errors.most_memory:.2f} %)"
    )


def update(page: Path, lines: Sequence[str]) -> None:
    """Replace the lines of ``page`` that are about the same cells as ``lines``.

    Raises:
        ValueError: if the page cannot be read, or has no line for a cell.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {page}: {error}") from error
    rows = text.splitlines()
    for new in lines:
        about = "|".join(new.split("|")[:6]) + "|"
        found = [i for i, row in enumerate(rows) if row.startswith(about)]
        if len(found) != 1:
            raise ValueError(f"{page} has {len(found)} lines that begin with '{about}', not one")
        rows[found[0]] = new
    page.write_text("\n".join(rows) + "\n", encoding="utf-8")


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
    add("--update", type=Path, metavar="PAGE", help="also replace the lines of these cells there")
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
    if arguments.update is not None:
        update(arguments.update, [line(*pair, None) for pair in zip(cells, jobs, strict=True)])


def _setup(cell: Cell) -> tuple[str, int, int, str]:
    """Return the values that are equal for cells with the same model and GPUs."""
    return cell.schedule, cell.gpus, cell.seq_length, cell.vocabulary


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
