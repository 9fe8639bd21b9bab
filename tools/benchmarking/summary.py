"""From the runs of a benchmark's cases to one row each: medians over the rounds, and ratios."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeAlias

from tools.benchmarking.case import BASE, BenchmarkCase


@dataclass(frozen=True)
class Row:
    """One case of the report; medians over the rounds. ``None``: a reference does not tell.

    Attributes:
        vocab_size: V.
        schedule: of ours, or the name of a reference.
        treatment: of the vocabulary.
        layout: ranks of the axes; empty for references.
        schedule_ms: forwards and backwards of all microbatches.
        cpu_s: seconds of the CPU that all ranks together take for the schedule. Other programs on
            the machine change it less than ``schedule_ms``.
        update_ms: gradient norm, optimizer step and clearing of the gradients.
        tokens_per_s: of the whole job, in forward and backward.
        mfu: model FLOPs / (p x ``Rates.peak``), over the schedule.
        memory_gb: peak of every rank.
        in_flight: microbatches in flight seen on every rank.
        promised_in_flight: microbatches in flight by the plan, for every pipeline rank.
        promised_gb: of tensors at the peak, by the count of the code; for every pipeline rank.
        to_base: how many times as fast as ``BASE`` at the same V.
        idle: the share of the schedule in which a rank runs no pass, averaged over the ranks; from
            the times of all passes, measured in the same run.
        simulated: the simulator's schedule from measured costs, over the measured one.
        to_floor: schedule over the GEMM floor, model FLOPs / (p x ``Rates.product``).
        loss: of the initial weights on the first microbatches.
        pass_ms: mean time of a pass by kind, a value for each rank.
    """

    vocab_size: int
    schedule: str
    treatment: str
    layout: str
    schedule_ms: float
    update_ms: float | None
    tokens_per_s: float
    mfu: float
    memory_gb: list[float]
    in_flight: list[float] | None
    to_base: float | None
    idle: float | None
    simulated: float | None
    to_floor: float
    loss: float
    pass_ms: dict[str, list[float]]
    promised_in_flight: list[float] | None = None
    promised_gb: list[float] | None = None
    cpu_s: float | None = None

    @property
    def with_update_ms(self) -> float | None:
        """Time of an iteration with its update."""
        return None if self.update_ms is None else self.schedule_ms + self.update_ms


@dataclass(frozen=True)
class Rates:
    """TFLOP/s of a rank in matrix products, over the cases of a round.

    A single measurement is up to 10 % off, and no case has any part in it.

    Attributes:
        product: the output layer's own product in one piece, the mean.
        peak: the best product that was found, the median.
    """

    product: float
    peak: float


Runs: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]
"""What was measured of every case by its name, in one round after the other."""


def rates_of(runs: Runs) -> list[Rates]:
    """Return the rates of every round."""
    rates = []
    for cases in zip_longest(*runs.values()):
        ran = [run for run in cases if run is not None]
        product = statistics.fmean(run["product_tflops"] for run in ran)
        rates.append(Rates(product, statistics.median(run["peak_tflops"] for run in ran)))
    return rates


def summarise(cases: Sequence[BenchmarkCase], runs: Runs) -> list[Row]:
    """Return one row per case."""
    rates = rates_of(runs)
    bases = {
        case.vocab_size: _median(runs[case.name], lambda run: run["schedule_s"])
        for case in cases
        if (case.schedule, case.treatment) == BASE
        and case.tensor == case.replicas == case.slices == 1
    }
    return [_row(case, runs[case.name], rates, bases.get(case.vocab_size)) for case in cases]


def _median(
    runs: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]
) -> float:
    return statistics.median(map(value, runs))


def _row(
    case: BenchmarkCase,
    runs: Sequence[Mapping[str, Any]],
    rates: Sequence[Rates],
    base: float | None,
) -> Row:
    def if_known(key: str, value: Callable[[Mapping[str, Any]], float]) -> float | None:
        return _median(runs, value) if key in runs[0] else None

    def by_rank(values: Callable[[Mapping[str, Any]], Sequence[float]]) -> list[float]:
        return [statistics.median(of_rank) for of_rank in zip(*map(values, runs), strict=True)]

    def pass_ms(kind: str) -> list[float]:
        return by_rank(lambda run: run["pass_ms"][kind])

    def over(rate: Callable[[Rates], float]) -> float:
        """Return the schedule's time over the time of its products alone at a rate."""
        multiples: list[float] = [
            run["schedule_s"] * case.processes * rate(of_round) * 1e12 / run["flops"]
            for run, of_round in zip(runs, rates, strict=False)
        ]
        return statistics.median(multiples)

    seconds = _median(runs, lambda run: run["schedule_s"])
    return Row(
        vocab_size=case.vocab_size,
        schedule=case.schedule,
        treatment=case.treatment,
        layout=case.layout,
        schedule_ms=1e3 * seconds,
        update_ms=if_known("update_s", lambda run: 1e3 * run["update_s"]),
        tokens_per_s=case.microbatches * case.seq_length / seconds,
        mfu=1 / over(lambda rates: rates.peak),
        memory_gb=by_rank(lambda run: [held / 1e9 for held in run["memory_bytes"]]),
        in_flight=runs[0].get("in_flight"),
        to_base=None if base is None else base / seconds,
        idle=if_known("ideal_s", lambda run: 1 - run["ideal_s"] / run["schedule_s"]),
        simulated=if_known("simulated_s", lambda run: run["simulated_s"] / run["schedule_s"]),
        to_floor=over(lambda rates: rates.product),
        loss=runs[0]["loss"],
        pass_ms={kind: pass_ms(kind) for kind in runs[0].get("pass_ms", {})},
        promised_in_flight=runs[0].get("promised_in_flight"),
        cpu_s=if_known("cpu_s", lambda run: run["cpu_s"]),
        promised_gb=[held / 1e9 for held in runs[0].get("promised_bytes", [])],
    )
