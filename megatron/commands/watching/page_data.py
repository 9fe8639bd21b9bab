"""The values of the page, as JSON: points of curves for a screen, tables, and notes.

A page of a million records must be quick. So a curve has at most ``KEPT`` points for each column of
pixels of the asked range.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from math import inf, isfinite
from typing import Any, Final, Literal, cast, get_args

import numpy as np

from megatron.commands.watching.by_rank import layers_json, ranks_json, slowest_json
from megatron.commands.watching.charts import CHARTS, Chart, Curve, is_worth_showing
from megatron.commands.watching.run import Run
from megatron.commands.watching.table import KEPT, Numbers, thinned

Axis = Literal["iteration", "tokens", "hours"]

POINTS: Final = 2000
"""Points of a curve at most."""

_OF_CHART: Final = 8 * POINTS  # points of all runs in a chart; of more runs, each has fewer
_FEWEST: Final = 400

MOST_RESTARTS: Final = 100
"""Restarts of a run that the page marks: the last ones."""

RECENT: Final = 100
"""Intervals over which usual values are taken."""

_VARYING: Final = ("seconds_per_iteration", "tokens_per_second", "mfu", "idle")
_SLOW: Final = 1.5  # times the usual time from which on an interval counts as slow
_SLOWEST: Final = 5  # slow intervals that are listed


@dataclass(frozen=True)
class View:
    """The part of the curves that is asked for.

    Attributes:
        axis: what they are drawn over.
        low: its left end.
        high: its right end.
        points: of a curve at most.
    """

    axis: Axis = "iteration"
    low: float = -inf
    high: float = inf
    points: int = POINTS

    @classmethod
    def of_query(cls, query: Mapping[str, str]) -> "View":
        """Return the view that a request of the page asks for.

        Raises:
            ValueError: it asks for none.
        """
        axis = query.get("axis", "iteration")
        if axis not in get_args(Axis):
            raise ValueError(f"axis {axis!r:.40}: give one of {', '.join(get_args(Axis))}")
        low, high = (float(query.get(name, end)) for name, end in (("from", -inf), ("to", inf)))
        if not low < high:
            raise ValueError("the range from ... to ... must not be empty")
        points = int(query.get("points", POINTS))
        return cls(axis, low, high, max(KEPT, min(POINTS, points)))  # type: ignore[arg-type]


def page_data(runs: Sequence[Run], view: View) -> dict[str, Any]:
    """Return runs with their curves, and the charts for which a run has numbers."""
    curves = {chart.name: [list(chart.curves(run)) for run in runs] for chart in CHARTS}
    shown = [own for own in CHARTS if is_worth_showing(own, chain(*curves[own.name]))]
    ranges = {axis: _extent(runs, axis) for axis in get_args(Axis)}
    ends = _within(ranges[view.axis], view)
    columns = min(view.points, max(_FEWEST, _OF_CHART // max(1, len(runs)))) // KEPT
    return {
        "axis": view.axis,
        "ranges": ranges,
        "charts": [_chart_json(chart) for chart in shown],
        "runs": [
            _run_json(run)
            | {
                "curves": {
                    own.name: _drawn(curves[own.name][at], view.axis, ends, columns)
                    for own in shown
                }
            }
            for at, run in enumerate(runs)
        ],
    }


def _chart_json(chart: Chart) -> dict[str, Any]:
    names = ("name", "title", "unit", "form", "logarithmic", "promise")
    return {name: getattr(chart, name) for name in names}


def _extent(runs: Iterable[Run], axis: str) -> list[float]:
    """Return the least and the greatest place of all rows on an axis."""
    tables = [table for run in runs for table in (run.intervals, *run.evaluations.values())]
    known = [own[np.isfinite(own)] for own in (table.numbers(axis) for table in tables)]
    low = min((float(own.min()) for own in known if len(own)), default=0.0)
    high = max((float(own.max()) for own in known if len(own)), default=1.0)
    return [low, high] if low < high else [low, low + 1.0]


def _within(extent: Sequence[float], view: View) -> tuple[float, float]:
    """Return the ends of the visible range."""
    low, high = max(extent[0], view.low), min(extent[1], view.high)
    return (low, high) if low < high else (view.low, view.high)


def _drawn(
    curves: Iterable[Curve], along: Axis, ends: Sequence[float], columns: int
) -> list[dict[str, Any]]:
    """Return the points of curves; those without a number are left out."""
    drawn = []
    for curve in curves:
        y = curve.table.numbers(curve.column)
        axes = {axis: curve.table.numbers(axis) for axis in get_args(Axis)}
        known = np.isfinite(y) & np.isfinite(axes[along])
        y, axes = y[known], {axis: own[known] for axis, own in axes.items()}
        if not len(y):
            continue
        x = np.maximum.accumulate(axes[along])  # a clock may have been set back
        kept = thinned(x, y, ends[0], ends[1], columns)
        drawn.append(
            {
                "label": curve.label,
                "look": curve.look,
                "count": len(y),
                "y": y[kept].tolist(),
                **{axis: _rounded(axis, own[kept]) for axis, own in axes.items()},
            }
        )
    return drawn


def _rounded(axis: str, values: Numbers) -> list[float | None]:
    """Return places on an axis; hours to a hundredth of a second, the others as they are."""
    if axis == "hours":
        return [round(own, 6) if np.isfinite(own) else None for own in values.tolist()]
    return [int(own) if np.isfinite(own) else None for own in values.tolist()]


def _run_json(run: Run) -> dict[str, Any]:
    """Return the page's figures of a run besides its curves."""
    rows = run.intervals
    columns = [name for name in rows.names if name not in ("tokens", "hours")]
    newest = {name: rows.newest(name) for name in columns}
    return {
        "name": run.name,
        "key": run.key,
        "facts": {name: _known(value) for name, value in run.facts.items()},
        "iteration": run.reached,
        "intervals": len(rows),
        "began": _known(run.began),
        "latest": _known(run.latest),
        "has_ended": run.has_ended,
        "newest": {name: _known(value) for name, value in newest.items()},
        "evaluations": {
            name: {"iteration": table.iterations[-1], "lm_loss": _known(table.newest("lm_loss"))}
            for name, table in run.evaluations.items()
            if len(table)
        },
        "starts": run.starts,
        "restarts": [
            {name: _known(value) for name, value in asdict(own).items()}
            for own in run.restarts[-MOST_RESTARTS:]
        ],
        "totals": {name: _total(rows.numbers(name)) for name in ("skipped", "nans")},
        "usual": _usual(run),
        "slow": _slow(run),
        "busiest": _busiest(run),
        "slowest": slowest_json(run),
        "ranks": ranks_json(run.ranks),
        "layers": layers_json(run.layers),
        "written": [asdict(own) for own in reversed(run.written)],
    }


def _usual(run: Run) -> dict[str, float | None]:
    """Return the medians of figures that vary, over the last intervals that have them."""
    found = {}
    for name in _VARYING:
        numbers = run.intervals.numbers(name)
        recent = numbers[np.isfinite(numbers)][-RECENT:]
        with np.errstate(over="ignore"):
            found[name] = _known(float(np.median(recent))) if len(recent) else None
    return found


def _slow(run: Run) -> dict[str, Any]:
    """Return how many intervals were slow, and the slowest."""
    seconds = run.intervals.numbers("seconds_per_iteration")
    known = np.isfinite(seconds)
    if not known.any():
        return {"times": _SLOW, "count": 0, "slowest": []}
    with np.errstate(over="ignore"):
        least = _SLOW * float(np.median(seconds[known]))
    slow = np.flatnonzero(known & (seconds > least))
    order = slow[np.argsort(-seconds[slow], kind="stable")][:_SLOWEST].tolist()
    rows = [
        {"iteration": run.intervals.iterations[at], "seconds": float(seconds[at])} for at in order
    ]
    return {"times": _SLOW, "count": len(slow), "slowest": rows}


def _busiest(run: Run) -> dict[str, Any] | None:
    """Return the rank that most often idles least, and in which share of the intervals."""
    ranks = run.intervals.numbers("busiest rank")
    ranks = ranks[np.isfinite(ranks)]
    if not len(ranks):
        return None
    found, counts = np.unique(ranks, return_counts=True)
    most = int(counts.argmax())
    return {"rank": int(found[most]), "share": float(counts[most] / len(ranks))}


def _total(numbers: np.ndarray) -> float | None:
    """Return a sum without NaN; ``None`` if it is too large for a number."""
    with np.errstate(over="ignore"):
        return cast("float | None", _known(float(np.nansum(numbers))))


def _known(value: Any) -> Any:
    """Return a value; ``None`` for NaN, which JSON does not have."""
    return None if isinstance(value, float) and not isfinite(value) else value
