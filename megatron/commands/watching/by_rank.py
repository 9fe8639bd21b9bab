"""Figures of ranks, and loads of experts, in the newest record of a run."""

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, Final

import numpy as np

from megatron.commands.watching.record import Record, mean_reasons, number
from megatron.commands.watching.run import Run

MOST_BARS: Final = 512
"""Bars of a chart by rank; neighbouring ranks share one if there are more ranks."""

_MOST_SLOWEST: Final = 5  # ranks of a table

MOST_LAYERS: Final = 256
MOST_EXPERTS: Final = 1024


def ranks_json(ranks: Sequence[Record]) -> list[dict[str, Any]]:
    """Return bars: first and last rank, most memory, least and mean idle share, most slowness."""
    size = max(1, -(-len(ranks) // MOST_BARS))
    groups = (ranks[first : first + size] for first in range(0, len(ranks), size))
    return [_bar(first * size, own) for first, own in enumerate(groups)]


def _bar(first: int, ranks: Sequence[Record]) -> dict[str, Any]:
    held = _numbers(own.get("peak_memory") for own in ranks)
    reserved = _numbers(own.get("reserved_memory") for own in ranks)
    idle = _numbers(own.get("idle") for own in ranks)
    return {
        "first": first,
        "last": first + len(ranks) - 1,
        "peak_memory": max(held, default=None),
        "reserved_memory": max(reserved, default=None),
        "idle": sum(own / len(idle) for own in idle) if idle else None,
        "least_idle": min(idle, default=None),
        "slowness": max(_numbers(own.get("slowness") for own in ranks), default=None),
        "reasons": {name: share for name, share in mean_reasons(ranks).items() if isfinite(share)},
    }


def slowest_json(run: Run) -> list[dict[str, Any]]:
    """Return the ranks that are slowest most often, the first one most often.

    Each has the share of the intervals in which it is the slowest, the median of its slowness in
    them, its coordinates, and the passes in which it lost most in the last of them.
    """
    ranks, slowness = (run.intervals.numbers(name) for name in ("slowest rank", "slowness"))
    known = np.isfinite(ranks) & np.isfinite(slowness)
    ranks, slowness = ranks[known], slowness[known]
    found, counts = np.unique(ranks, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_MOST_SLOWEST]
    return [
        {
            "rank": int(rank),
            "share": count / len(ranks),
            "slowness": float(np.median(slowness[ranks == rank])),
            **run.slowest.get(rank, {}),
        }
        for rank, count in zip(found[order].tolist(), counts[order].tolist(), strict=True)
    ]


def layers_json(layers: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the loads of the experts of every layer, as multiples of the layer's mean."""
    found = []
    for own in layers[:MOST_LAYERS]:
        loads = own.get("expert_loads")
        layer = number(own.get("layer"))
        if not isinstance(loads, list) or not loads or layer != layer:
            continue
        counts = [0.0 if (n := number(load)) != n else n for load in loads[:MOST_EXPERTS]]
        mean = sum(counts) / len(counts)
        if mean > 0:
            shares = [round(count / mean, 4) for count in counts]
            found.append({"layer": int(layer), "experts": len(loads), "loads": shares})
    return found


def _numbers(values: Iterable[object]) -> list[float]:
    return [own for value in values if (own := number(value)) == own]
