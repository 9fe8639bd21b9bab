"""The charts of the page: their figures, units and words. docs/metrics.md defines the figures."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from megatron.commands.watching.run import Run
from megatron.commands.watching.table import Numbers, Table

Form = Literal["number", "percent", "seconds", "bytes"]


@dataclass(frozen=True)
class Curve:
    """A curve of a chart.

    Attributes:
        label: its words in the legend; empty: the chart has no other.
        table: the rows.
        column: of the rows.
        look: how the curve is drawn: ``line``, ``dots`` (a line with a dot at every row), ``edge``
            (a pale line: the least or the greatest of the ranks).
    """

    label: str
    table: Table
    column: str
    look: Literal["line", "dots", "edge"] = "line"


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        name: name by which the page knows the run.
        title: its words.
        unit: of its values, as the axis tells it.
        form: of its values.
        columns: of a run's intervals, with their labels and looks.
        prefix: further columns whose names begin so, unless they are always 0.
        logarithmic: whether the reader may ask for a logarithmic axis.
        promise: field of a plan that predicts the figure; empty: no plan predicts the figure.
    """

    name: str
    title: str
    unit: str
    form: Form
    columns: tuple[tuple[str, str, Literal["line", "dots", "edge"]], ...] = ()
    prefix: str = ""
    logarithmic: bool = False
    promise: str = ""

    def curves(self, run: Run) -> Iterator[Curve]:
        """Yield the curves of a run for which it has numbers."""
        rows = run.intervals
        for column, label, look in self.columns:
            if column in rows.names:
                yield Curve(label, rows, column, look)
        for column in rows.names:
            if self.prefix and column.startswith(self.prefix) and _is_known(rows.numbers(column)):
                yield Curve(column.removeprefix(self.prefix), rows, column)
        if self.name == "loss":
            for data, evaluations in run.evaluations.items():
                yield Curve(data, evaluations, "lm_loss", "dots")


CHARTS: Final = (
    Chart("loss", "Loss", "nats per token", "number", (("lm_loss", "training", "line"),),
          logarithmic=True),
    Chart("further", "Losses of further tokens", "nats per token", "number",
          prefix="loss of ", logarithmic=True),
    Chart("rate", "Learning rate", "of the next step", "number", (("learning_rate", "", "line"),)),
    Chart("norm", "Gradient norm", "before clipping", "number", (("grad_norm", "", "line"),),
          logarithmic=True),
    Chart("seconds", "Time of an iteration", "seconds", "seconds",
          (("seconds_per_iteration", "", "line"),), logarithmic=True, promise="seconds"),
    Chart("speed", "Throughput", "tokens per second, all ranks", "number",
          (("tokens_per_second", "", "line"),), promise="tokens_per_second"),
    Chart("mfu", "MFU", "share of the peak", "percent", (("mfu", "", "line"),), promise="mfu"),
    Chart("idle", "Idle", "share of the time of the passes", "percent",
          (("idle", "mean of the ranks", "line"), ("idle max", "idlest and busiest rank", "edge"),
           ("idle min", "idlest and busiest rank", "edge")), promise="idle"),
    Chart("reasons", "Idle by reason", "share of that time, mean of the ranks", "percent",
          prefix="idle: "),
    Chart("slowest", "Slowest rank", "computing time, times the usual one", "number",
          (("slowness", "", "line"),)),
    Chart("memory", "Peak memory", "GiB since the start of the processes", "bytes",
          (("peak_memory max", "fullest rank", "line"),
           ("peak_memory min", "emptiest rank", "edge"),
           ("reserved_memory max", "held by the allocator, most", "dots")), promise="bytes"),
    Chart("skipped", "Iterations without a step", "of each interval", "number",
          (("skipped", "skipped", "line"), ("nans", "loss not finite", "dots"))),
    Chart("batch", "Global batch", "samples", "number", (("global_batch_size", "", "line"),)),
    Chart("scale", "Loss scale", "of the next iteration", "number", (("loss_scale", "", "line"),),
          logarithmic=True),
    Chart("weights", "Norm of the weights", "after the last step", "number",
          (("params_norm", "", "line"),)),
    Chart("zeros", "Zeros of the gradient", "of the last iteration", "number",
          (("num_zeros", "", "line"),)),
    Chart("router", "Losses of routers", "without their coefficients", "number",
          prefix="router: "),
    Chart("balance", "Busiest expert", "times the mean load of its layer", "number",
          (("expert_imbalance", "", "line"),)),
)  # fmt: skip
"""All charts, in the order of the page. A chart without numbers is not shown."""

FLAT: Final = ("batch", "skipped", "scale")
"""Charts that are shown only if a value changes: most runs have none worth a picture."""


def _is_known(numbers: Numbers) -> bool:
    """Whether some number is neither unknown nor 0."""
    return bool((np.nan_to_num(numbers) != 0).any())


def is_worth_showing(chart: Chart, curves: Iterable[Curve]) -> bool:
    """Whether a chart is worth showing: there are numbers, and they change if they must."""
    numbers = [curve.table.numbers(curve.column) for curve in curves]
    known = [own[np.isfinite(own)] for own in numbers]
    if chart.name not in FLAT:
        return any(len(own) for own in known)
    return any(len(own) and own.min() != own.max() for own in known)
