"""The report over a benchmark's runs: medians, ratios, a table, a plot."""

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from benchmark_case import Case


@dataclass(frozen=True)
class Row:
    """One case of the report; medians over the rounds.

    Attributes:
        vocab_size: V.
        treatment: of the vocabulary.
        iteration_ms: schedule and update.
        schedule_ms: forwards and backwards of all microbatches.
        update_ms: gradient norm, optimizer step and clearing of the gradients.
        tokens_per_s: of the whole job.
        mfu: model FLOPs over what the ranks' best matrix product would do in the same time.
        memory_gb: peak of every rank.
        in_flight: microbatches in flight seen on every rank.
        to_none: how many times faster than ``none`` at the same V, iteration against iteration.
        of_ideal: the share of the schedule that is not waiting: (compute time of all passes, summed
            over ranks, measured in the same run) / p, over the schedule.
        simulated: the simulator's schedule from the mean pass times, over the measured one.
        to_floor: iteration over the GEMM floor, model FLOPs / (p x rate), with the rate of the
            output layer's own product in one piece.
        to_peak_floor: the same with the rate of the best product that was found.
        product_tflops: that first rate, the slowest rank's.
        peak_tflops: that second rate.
        pass_ms: mean time of a pass by kind, a value for each rank.
    """

    vocab_size: int
    treatment: str
    iteration_ms: float
    schedule_ms: float
    update_ms: float
    tokens_per_s: float
    mfu: float
    memory_gb: list[float]
    in_flight: list[float]
    to_none: float | None
    of_ideal: float
    simulated: float
    to_floor: float
    to_peak_floor: float
    product_tflops: float
    peak_tflops: float
    pass_ms: dict[str, list[float]]


def summarise(cases: Sequence[Case], runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Row]:
    """Return one row per case."""
    rows: list[Row] = []
    for case in cases:
        base = next(
            (r for r in rows if (r.vocab_size, r.treatment) == (case.vocab_size, "none")), None
        )
        rows.append(_row(case, runs[case.name], base))
    return rows


def _row(case: Case, runs: Sequence[Mapping[str, Any]], base: Row | None) -> Row:
    def median(value: Any) -> float:
        return statistics.median(value(run) for run in runs)

    def iteration(run: Mapping[str, Any]) -> float:
        return run["schedule_s"] + run["update_s"]

    seconds = median(iteration)
    flops = runs[0]["flops"]
    iteration_ms = 1e3 * seconds
    return Row(
        vocab_size=case.vocab_size,
        treatment=case.treatment,
        iteration_ms=iteration_ms,
        schedule_ms=1e3 * median(lambda run: run["schedule_s"]),
        update_ms=1e3 * median(lambda run: run["update_s"]),
        tokens_per_s=case.microbatches * case.seq_length / seconds,
        mfu=median(lambda run: flops / (iteration(run) * case.ranks * run["peak_tflops"] * 1e12)),
        memory_gb=[
            median(lambda run, rank=rank: run["memory_bytes"][rank] / 1e9)
            for rank in range(case.ranks)
        ],
        in_flight=list(runs[0]["in_flight"]),
        to_none=base.iteration_ms / iteration_ms if base is not None else None,
        of_ideal=median(lambda run: run["ideal_s"] / run["schedule_s"]),
        simulated=median(lambda run: run["simulated_s"] / run["schedule_s"]),
        to_floor=median(
            lambda run: iteration(run) * case.ranks * run["product_tflops"] * 1e12 / flops
        ),
        to_peak_floor=median(
            lambda run: iteration(run) * case.ranks * run["peak_tflops"] * 1e12 / flops
        ),
        product_tflops=median(lambda run: run["product_tflops"]),
        peak_tflops=median(lambda run: run["peak_tflops"]),
        pass_ms={
            kind: [
                median(lambda run, kind=kind, rank=rank: run["pass_ms"][kind][rank])
                for rank in range(case.ranks)
            ]
            for kind in runs[0]["pass_ms"]
        },
    )


def write_report(rows: Sequence[Row], case: Case, command: str, rounds: int, folder: Path) -> None:
    """Write ``report.md``, ``.json`` and ``.png`` into ``folder``, and print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"command": command, "machine": machine(), "rounds": rounds}
    document["rows"] = [asdict(row) for row in rows]
    (folder / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "report.md").write_text(markdown(rows, case, command, rounds))
    plot(rows, folder / "report.png")
    print(table(rows))


def machine() -> str:
    """Return what the figures were measured on."""
    device = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    models = [
        line.partition(":")[2].strip()
        for line in _lines(Path("/proc/cpuinfo"))
        if line.startswith("model name")
    ]
    processor = f"{len(models)} x {models[0]}" if models else platform.processor()
    return f"{device}{processor}, {platform.system()}, PyTorch {torch.__version__}"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def markdown(rows: Sequence[Row], case: Case, command: str, rounds: int) -> str:
    """Return the report as text."""
    return f"""# Treatments of the vocabulary, {datetime.now():%Y-%m-%d}

    {command}

{machine()}; p = {case.ranks}, m = {case.microbatches}, {case.layers} layers,
h = {case.hidden_size}, {case.heads} heads, s = {case.seq_length}, {case.dtype}, untied, microbatch
1; medians of {rounds} rounds, the cases in turn, each in fresh processes.

{table(rows)}

*vs none*: times as fast as none, whole iterations. *of ideal*: share of the schedule that is
compute, (time in passes, all ranks) / p over the schedule. *simulated*: the simulator's
schedule from the mean pass times over the measured one. *floor*: iteration over model FLOPs /
(p x rate of a rank), with the rate of the output layer's product [n, h] x [h, 128000] in one
piece; *peak floor* and *MFU*: with the rate of the best square product. Both rates are measured in
the same run, on all ranks at once.

![ms per iteration]({"report.png"})

## Passes

Mean ms of a pass, by rank.

{pass_table(rows)}
"""


def table(rows: Sequence[Row]) -> str:
    """Return the main table in markdown."""
    lines = [
        "| V | vocabulary | ms / iteration | schedule | update | tokens/s | MFU | vs none "
        "| of ideal | simulated | floor | peak floor | GB by rank | in flight |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|---|",
    ]
    for row in rows:
        against = "" if row.to_none is None else f"{row.to_none:.2f}x"
        lines.append(
            f"| {row.vocab_size // 1000}k | {row.treatment} | {row.iteration_ms:,.0f} "
            f"| {row.schedule_ms:,.0f} | {row.update_ms:,.0f} | {row.tokens_per_s:,.0f} "
            f"| {row.mfu:.1%} | {against} | {row.of_ideal:.3f} | {row.simulated:.3f} "
            f"| {row.to_floor:.2f}x | {row.to_peak_floor:.2f}x "
            f"| {' '.join(f'{gb:.2f}' for gb in row.memory_gb)} "
            f"| {' '.join(f'{held:g}' for held in row.in_flight)} |"
        )
    return "\n".join(lines)


def pass_table(rows: Sequence[Row]) -> str:
    """Return the mean pass times in markdown."""
    kinds = ["F", "B", "S", "T", "IF", "IB"]
    lines = [
        "| V | vocabulary | " + " | ".join(kinds) + " |",
        "|--:|---|" + "---|" * len(kinds),
    ]
    for row in rows:
        cells = (" ".join(f"{ms:.1f}" for ms in row.pass_ms.get(kind, [])) for kind in kinds)
        lines.append(f"| {row.vocab_size // 1000}k | {row.treatment} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw iteration time over the vocabulary size, a line for each treatment."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for treatment in dict.fromkeys(row.treatment for row in rows):
        own = [row for row in rows if row.treatment == treatment]
        sizes = [row.vocab_size / 1000 for row in own]
        axes.plot(sizes, [row.iteration_ms / 1000 for row in own], "o-", label=treatment)
    axes.set_xlabel("vocabulary (thousand entries)")
    axes.set_ylabel("seconds per iteration")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
