"""The report of a benchmark: tables, a plot, and how they are to be read."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from megatron.simulator.metrics import definitions
from tools.benchmarking.allocator import allocator_name
from tools.benchmarking.case import BASE, BenchmarkCase
from tools.benchmarking.harness import machine
from tools.benchmarking.summary import Rates, Row, Runs
from tools.pages import tables

PASS_KINDS: Final = ("F", "R", "B", "W", "S", "E", "T", "IF", "IB", "U")


@dataclass(frozen=True)
class Report:
    """The content of the report's files.

    Attributes:
        rows: one row for each case.
        rates: the rates of every round.
        case: any of the cases, for the sizes that they share.
        command: the command that made the report.
        rounds: number of rounds.
        remarks: remarks in addition to the rows, one sentence each.
        runs: every measurement.
    """

    rows: Sequence[Row]
    rates: Sequence[Rates]
    case: BenchmarkCase
    command: str
    rounds: int
    remarks: Sequence[str] = ()
    runs: Runs = field(default_factory=dict)


def write_report(report: Report, folder: Path) -> None:
    """Write ``report.md``, ``.json`` and ``.png`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "command": report.command,
        "machine": machine(report.case.device, allocator_name()),
        "rounds": report.rounds,
        "remarks": list(report.remarks),
        "rates": [asdict(rates) for rates in report.rates],
        "rows": [asdict(row) for row in report.rows],
        "runs": report.runs,
    }
    (folder / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "report.md").write_text(markdown(report))
    plot(report.rows, folder / "report.png")


def markdown(report: Report) -> str:
    """Return the report as text."""
    case = report.case
    computer = machine(case.device, allocator_name())
    remarks = "".join(f"* {remark}\n" for remark in [*report.remarks, *_losses(report.rows)])
    return f"""# Schedules and treatments of the vocabulary, {datetime.now():%Y-%m-%d}

    {report.command}

{computer}; {case.processes} ranks, m = {case.microbatches}, {case.layers} layers,
h = {case.hidden_size}, {case.heads} heads, s = {case.seq_length}, {case.dtype}, untied, microbatch
1; medians of {report.rounds} rounds, the cases in turn, each in fresh processes.

{table(report.rows)}

{definitions("time", "idle", "in flight")}

*CPU s*: seconds of the CPU that all ranks together take for the same work as *time*. Other programs
on the machine change them less.

*speed*: times as fast as {BASE[0]} with {BASE[1]}.

*layout*: tensor-parallel ranks t (with `--sequence-parallel`), pipeline ranks p, replicas d, and n
slices of a microbatch. Replicas share the microbatches, and the optimizer's state
(`--use-distributed-optimizer`), and overlap RG and AG. Their update and AG of the last iteration
are in the time of the next.

*promised*: by the plan, for every pipeline rank: the microbatches in flight, and the bytes of
tensors by the count of the code, as in a dry run. *GB by rank* on CPUs is that of the whole
process, so it also has the interpreter and its libraries.

*single* is one process with a thread for every rank, *pytorch-1f1b* and *pytorch-zbv* are PyTorch's
`Schedule1F1B` and `ScheduleZBVZeroBubble`, *pytorch-ddp* is its `DistributedDataParallel` with
`ZeroRedundancyOptimizer`, and *pytorch-tp* its `parallelize_module` over DTensors, with the
vocabulary cut too and the loss on its shards (`loss_parallel`): plain modules with the same initial
weights, data and dtype, gradients accumulated in that dtype.

{remarks}
![time over the floor](report.png)

## More figures

{detail_table(report.rows)}

*update*: gradient norm, optimizer step and clearing of the gradients, in ms; no other figure but
*with update* contains it. References have it where they are compared with replicas: AdamW in the
dtype of the weights, without a norm, where ours keeps fp32 masters.

{definitions("floor", "MFU", "simulated")}

The table has the time as a multiple of the floor. Every case measures both rates, on all ranks at
once; of a round the mean of the first counts and the median of the second:
{_listed(rates.product for rates in report.rates)} and
{_listed(rates.peak for rates in report.rates)} TFLOP/s.

## Passes

Mean ms of a pass, by rank.

{pass_table(report.rows)}
"""


def _listed(rates: Iterable[float]) -> str:
    return ", ".join(f"{rate:.3f}" for rate in rates)


def _losses(rows: Sequence[Row]) -> list[str]:
    """Return the spread of the losses before the first update, when all weights are the same."""
    remarks = []
    for vocab_size in dict.fromkeys(row.vocab_size for row in rows):
        losses = [row.loss for row in rows if row.vocab_size == vocab_size]
        spread = (max(losses) - min(losses)) / min(losses)
        remarks.append(
            f"V = {_thousands(vocab_size)}: first loss {min(losses):.4f}, in all cases to "
            f"{spread:.1e} relative."
        )
    return remarks


def _thousands(vocab_size: int) -> str:
    return f"{vocab_size / 1000:g}k"


def table(rows: Sequence[Row]) -> str:
    """Return the main table in markdown: time, idle share, then the other figures of a case."""
    names = (
        *(*_CASE, "time, ms", "idle", "CPU s", "with update, ms", "speed"),
        *("GB by rank", "in flight", "GB promised", "in flight, promised"),
    )
    cells = (
        (
            *_case(row),
            f"{row.schedule_ms:,.0f}",
            _cell(row.idle, ".1%"),
            _cell(row.cpu_s, ".2f"),
            _cell(row.with_update_ms, ",.0f"),
            _cell(row.to_base, ".2f", "x"),
            " ".join(f"{gb:.2f}" for gb in row.memory_gb),
            " ".join(f"{held:g}" for held in row.in_flight or []),
            " ".join(f"{gb:.2f}" for gb in row.promised_gb or []),
            " ".join(f"{held:g}" for held in row.promised_in_flight or []),
        )
        for row in rows
    )
    return "\n".join(tables.table(names, cells, "rlllrrrrrl"))


def detail_table(rows: Sequence[Row]) -> str:
    """Return the table of the figures for those who look closer, in markdown."""
    names = (*_CASE, "update", "tokens/s", "MFU", "over the floor", "simulated")
    cells = (
        (
            *_case(row),
            _cell(row.update_ms, ",.0f"),
            f"{row.tokens_per_s:,.0f}",
            f"{row.mfu:.1%}",
            f"{row.to_floor:.2f}x",
            _cell(row.simulated, ".3f"),
        )
        for row in rows
    )
    return "\n".join(tables.table(names, cells, "rlllr"))


_CASE: Final = ("V", "schedule", "vocabulary", "layout")
"""Names of the first columns of all tables."""


def _case(row: Row) -> list[str]:
    return [_thousands(row.vocab_size), row.schedule, row.treatment, row.layout]


def _cell(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def pass_table(rows: Sequence[Row]) -> str:
    """Return the mean pass times in markdown."""
    measured = [row for row in rows if row.pass_ms]
    kinds = [kind for kind in PASS_KINDS if any(kind in row.pass_ms for row in measured)]
    cells = (
        (*_case(row), *(" ".join(f"{ms:.1f}" for ms in row.pass_ms.get(k, [])) for k in kinds))
        for row in measured
    )
    return "\n".join(tables.table((*_CASE, *kinds), cells, "rl"))


def best_of_each(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the lines of the plot: of each reference, and of each treatment's best schedules."""
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.vocab_size, row.to_floor)):
        label = row.treatment if row.layout else row.schedule
        line = lines.setdefault(label, [])
        if not line or line[-1].vocab_size != row.vocab_size:
            line.append(row)
    return lines


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the multiple of the floor over the vocabulary size."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for label, line in best_of_each(rows).items():
        style = "o-" if line[0].layout else "s--"
        sizes = [row.vocab_size / 1000 for row in line]
        axes.plot(sizes, [row.to_floor for row in line], style, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:g}k" for size in sizes])
    axes.set_xlabel("vocabulary; of every treatment the fastest schedule")
    axes.set_ylabel("time / floor")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
