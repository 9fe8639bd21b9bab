"""The contents of a rank's memory during its row, counted in units (slices of microbatches).

A rank holds the activations of a chunk from F to B. If W is a separate pass, the rank keeps a share
of these activations, ``kept``, from B to W, because the weight gradients need this share. With
flash attention the share is nearly 1. If attention matrices are stored, B frees them, and the share
is 32 / (34 + 5 a s / h) (arXiv 2401.10241, section 4.1: a heads, sequence length s, hidden size h).

If R computes a chunk again, the rank holds little from F to R, and all activations from R to B.
"""

from collections.abc import Iterable
from typing import NamedTuple

from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan


class Held(NamedTuple):
    """The quantities that a rank holds, or may hold.

    Attributes:
        activations: activations of one chunk of one unit.
        exponentials: units of the output layer between S and T.
        embeddings: units of the input layer between IF and the F of chunk 0.
        recomputed: chunks of units between R and B.
        gradients: units of the input layer between the B of chunk 0 and IB. On a rank
            without the first stage, an embedding's gradient arrives somewhat after the rank's own
            B.
    """

    activations: float
    exponentials: float
    embeddings: float
    recomputed: float = 0.0
    gradients: float = 0.0


def held_changes(plan: Plan, item: Pass, kept: float = 1.0) -> Held:
    """Return how ``item`` changes each quantity that its rank holds.

    Args:
        plan: the plan, which tells whether the backward and the vocabulary are split.
        item: any pass of the plan.
        kept: share of a microbatch's activations that stays from B to W.
    """
    after_backward = kept if plan.split_backward else 0.0
    activations = {"F": 1.0, "B": after_backward - 1.0, "W": -after_backward}.get(item.kind, 0.0)
    sharded, starts = plan.treatment.is_sharded, item.chunk == 0
    return Held(
        activations,
        (item.kind == "S") - (item.kind == "T"),
        sharded * ((item.kind == "IF") - (item.kind == "F" and starts)),
        plan.recomputes * ((item.kind == "R") - (item.kind == "B")),
        sharded * ((item.kind == "B" and starts) - (item.kind == "IB")),
    )


def peak_held(plan: Plan, row: Iterable[Pass], kept: float = 1.0) -> Held:
    """Return the peak of each quantity in ``Held`` on a rank with this ``row``.

    The peaks need not occur at the same time.
    """
    known: dict[tuple[str, int], list[tuple[int, float]]] = {}
    held, peaks = [0.0] * len(Held._fields), [0.0] * len(Held._fields)
    for item in row:
        changes = known.get((item.kind, item.chunk))
        if changes is None:
            changes = [(i, c) for i, c in enumerate(held_changes(plan, item, kept)) if c]
            known[item.kind, item.chunk] = changes
        for i, change in changes:
            held[i] += change
            if held[i] > peaks[i]:
                peaks[i] = held[i]
    return Held(*peaks)


def in_flight(plan: Plan, kept: float = 1.0) -> list[float]:
    """Return for every rank the most microbatches whose activations it holds at a time.

    A chunk counts as 1/v, its share of the rank's layers, and a slice as 1/n of a microbatch.
    """
    parts = plan.chunks * plan.slices
    return [peak_held(plan, row, kept).activations / parts for row in plan.rows]


def fits(plan: Plan, limits: Iterable[float]) -> bool:
    """Return whether no rank has more microbatches in flight than its limit."""
    return all(held <= most for held, most in zip(in_flight(plan), limits, strict=True))
