#!/usr/bin/env python3
"""Run the setups of the paper's tables, and write MFU and memory beside the published figures.

bash tools/reproduce_paper.sh --out DIR

Every cell is a job of its own, on data that are made up: only time and memory matter. Its records
stay in DIR, and a cell that has ended there is not run again. DIR/report.md and DIR/report.csv are
written anew after every cell, DIR/report.png at the end.
"""

import csv
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.flags.command import read
from megatron.flags.declare import flag, required
from megatron.flags.ranges import COUNT
from megatron.flags.readable import told_as_error
from tools.pages.tables import row as row_of
from tools.pages.tables import rule
from tools.predictions.measured import METHODS
from tools.predictions.paper_tables import (
    GIBIBYTE,
    MICROBATCHES,
    MODELS,
    TABLES,
    VOCABULARIES,
    Cell,
    read_cells,
)

ROOT: Final = Path(__file__).resolve().parents[1]

ITERATIONS: Final = 12
"""Iterations of every job; the first iterations warm up."""

MEASURED_FROM: Final = 5
"""First iteration that counts."""

SMALL_RANKS: Final = 2
SMALL: Final = 100
"""Factor by which the vocabularies are smaller in the small form of the runs."""

COLUMNS: Final = (
    "schedule", "gpus", "seq_length", "method", "vocabulary",
    "mfu", "published_mfu", "peak_gib", "published_peak_gib", "note",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The result of a cell of the paper's tables.

    Attributes:
        cell: the setup, with the published figures.
        mfu: MFU in percent; ``None``: the job did not end.
        peak_gib: memory of the fullest rank, in GiB.
        note: why there are no figures, or how their meaning differs from the published figures.
    """

    cell: Cell
    mfu: float | None = None
    peak_gib: float | None = None
    note: str = ""

    def row(self) -> dict[str, object]:
        """Return the result as a row of the table."""
        cell = self.cell
        values = (
            cell.schedule, cell.gpus, cell.seq_length, cell.method, cell.vocabulary,
            self.mfu, cell.mfu, self.peak_gib, cell.peak_gib, self.note,
        )  # fmt: skip
        return dict(zip(COLUMNS, values, strict=True))


def flags_of(cell: Cell, records: Path, *, small: bool) -> list[str]:
    """Return the flags of pretrain_gpt.py for a cell.

    Args:
        cell: the setup.
        records: file for the records of the job.
        small: use a model of a few thousand parameters on CPUs, with the cell's methods.
    """
    layers, hidden, heads = (4, 64, 4) if small else MODELS[cell.schedule][cell.gpus]
    sequence = 32 if small else cell.seq_length
    vocabulary = VOCABULARIES[cell.vocabulary] // (SMALL if small else 1)
    microbatches = 8 if small else MICROBATCHES
    flags = {
        "--pipeline-model-parallel-size": SMALL_RANKS if small else cell.gpus,
        "--pipeline-schedule": cell.schedule,
        "--vocab-parallel": METHODS[cell.method.lower()],
        "--num-layers": layers,
        "--hidden-size": hidden,
        "--num-attention-heads": heads,
        "--seq-length": sequence,
        "--max-position-embeddings": sequence,
        "--vocab-size": vocabulary,
        "--micro-batch-size": 1,
        "--global-batch-size": microbatches,
        "--train-iters": ITERATIONS,
        "--lr": 1e-4,
        "--attention-dropout": 0,
        "--hidden-dropout": 0,
        "--log-interval": 1,
        "--log-jsonl": records,
        "--device": "cpu" if small else "cuda",
    }
    words = [str(word) for pair in flags.items() for word in pair]
    words += ["--mock-data", "--untie-embeddings-and-output-weights", "--no-live-display"]
    return words if small else [*words, "--bf16"]


def outcome_of(cell: Cell, records: Path, note: str = "") -> Outcome | None:
    """Return the result from a job's records; ``None``: the job did not finish.

    The peak of memory counts tensors only, as in the paper.
    """
    if not records.is_file():
        return None
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    if not lines or lines[-1]["event"] != "end":
        return None
    timed = [line for line in lines if line["event"] == "iterations"]
    counted = [line for line in timed if line["iteration"] >= MEASURED_FROM]
    peak = max(rank["peak_memory"] for rank in timed[-1]["ranks"])
    return Outcome(cell, 100 * fmean(line["mfu"] for line in counted), peak / GIBIBYTE, note)


def run(cell: Cell, folder: Path, launch: Sequence[str], *, small: bool) -> Outcome:
    """Return the result of a cell; its job runs unless ``folder`` has its complete records."""
    name = f"{cell.schedule}-{cell.gpus}-{cell.seq_length}-{cell.method}-{cell.vocabulary}"
    records = folder / f"{name}.jsonl"
    note = "small model on CPUs: not to be compared" if small else ""
    if (known := outcome_of(cell, records, note)) is not None:
        return known
    records.unlink(missing_ok=True)
    command = [*launch, str(ROOT / "pretrain_gpt.py"), *flags_of(cell, records, small=small)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (folder / f"{name}.log").write_text(f"{shlex.join(command)}\n{done.stdout}")
    if done.returncode:
        memory = "out of memory" if "is out of memory" in done.stdout else "failed"
        return Outcome(cell, note=f"{memory}: see {name}.log")
    found = outcome_of(cell, records, note)
    return Outcome(cell, note=f"no records: see {name}.log") if found is None else found


def write(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Write the table as CSV and as Markdown."""
    rows = [outcome.row() for outcome in outcomes]
    with (folder / "report.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows)
    lines = [
        "# MFU and memory of the paper's setups",
        "",
        f"Command: `{shlex.join(['bash', 'tools/reproduce_paper.sh', *sys.argv[1:]])}`",
        "",
        "Ours: the mean over the iterations after the warm-up, and the most bytes of tensors on "
        "any rank. Published: arXiv 2411.05288, tables 5 and 6.",
        "",
        "| schedule | GPUs | sequence | method | V | MFU % | published | GiB | published | |",
        rule(10, "lrrlrrrrrl"),
    ]
    for row in rows:
        lines.append(
            row_of(*(f"{v:.2f}" if isinstance(v, float) else v or "" for v in row.values()))
        )
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw our and the published MFU and memory over the size of the vocabulary."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    setups = sorted({(o.cell.schedule, o.cell.gpus, o.cell.seq_length) for o in outcomes})
    figure, grid = pyplot.subplots(
        len(setups), 2, figsize=(11, 3.6 * len(setups)), layout="constrained", squeeze=False
    )
    for (schedule, gpus, sequence), axes in zip(setups, grid, strict=True):
        own = [
            o
            for o in outcomes
            if (o.cell.schedule, o.cell.gpus, o.cell.seq_length) == (schedule, gpus, sequence)
        ]
        for number, method in enumerate(dict.fromkeys(o.cell.method for o in own)):
            line = [o for o in own if o.cell.method == method]
            sizes = [VOCABULARIES[o.cell.vocabulary] / 1000 for o in line]
            color = f"C{number}"
            for axis, mine, theirs in (
                (axes[0], [o.mfu for o in line], [o.cell.mfu for o in line]),
                (axes[1], [o.peak_gib for o in line], [o.cell.peak_gib for o in line]),
            ):
                axis.plot(sizes, _drawn(mine), "o-", color=color, label=method)
                axis.plot(sizes, _drawn(theirs), "x--", color=color, alpha=0.5)
        for axis, what in zip(axes, ("MFU in %", "GiB of the fullest rank"), strict=True):
            axis.set_title(f"{schedule}, {gpus} GPUs, sequence {sequence}: {what}")
            axis.set_xlabel("thousands of vocabulary entries; dashed: published")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        axes[0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _drawn(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


@dataclass(frozen=True)
class CellFlags:
    """Cells of the tables."""

    out: Path = required("Folder of records and report.")
    gpus: int = flag(8, "GPUs of the setups.", COUNT)
    schedule: tuple[str, ...] = flag((), "Of tables 5 and 6.", choices=tuple(TABLES), unset="both")
    method: tuple[str, ...] = flag((), "As the paper writes them.", unset="all")
    vocab: tuple[str, ...] = flag((), "Sizes.", choices=tuple(VOCABULARIES), unset="all")
    seq_length: tuple[int, ...] = flag((), "Tokens of a sample.", COUNT, unset="all")
    launch: str = flag("", "What starts the ranks.", unset="torchrun on this machine")
    small: bool = flag(False, "A tiny model on two CPU ranks, to try it.")


def selected(arguments: CellFlags) -> Iterator[Cell]:
    """Yield the cells that the flags select."""
    for schedule, file in TABLES.items():
        for cell in read_cells(schedule, ROOT / "docs/reference" / file):
            if (
                cell.gpus == arguments.gpus
                and (not arguments.schedule or schedule in arguments.schedule)
                and (not arguments.method or cell.method in arguments.method)
                and (not arguments.vocab or cell.vocabulary in arguments.vocab)
                and (not arguments.seq_length or cell.seq_length in arguments.seq_length)
            ):
                yield cell


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        ValueError: for a selection without cells.
    """
    arguments = read(argv, __doc__, CellFlags)[CellFlags]
    cells = list(selected(arguments))
    if not cells:
        raise ValueError(
            f"--gpus {arguments.gpus}: the tables have no such setup; see docs/reference"
        )
    ranks = SMALL_RANKS if arguments.small else arguments.gpus
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch = shlex.split(arguments.launch) or [*torchrun, "--nproc-per-node", str(ranks)]
    folder: Path = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for number, cell in enumerate(cells, 1):
        outcomes.append(run(cell, folder, launch, small=arguments.small))
        write(outcomes, folder)
        own = outcomes[-1]
        figures = own.note if own.mfu is None else f"MFU {own.mfu:.2f} %, {own.peak_gib:.2f} GiB"
        print(
            f"{number} of {len(cells)}: {cell.schedule}, {cell.method}, {cell.vocabulary}, "
            f"sequence {cell.seq_length}: {figures}",
            flush=True,
        )
    plot(outcomes, folder / "report.png")
    if all(outcome.mfu is None for outcome in outcomes):
        raise ValueError(f"no cell ran; {outcomes[0].note}")


if __name__ == "__main__":
    with told_as_error(ValueError):
        main()
