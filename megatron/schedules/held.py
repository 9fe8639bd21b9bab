"""What a rank holds while it works through its row, counted in microbatches and chunks.

Activations of a chunk are held from F to B, and the share of them that the weight gradient needs
(``kept``) from B to W where W is a pass of its own. That share is nearly 1 with flash attention,
which leaves B nothing of its own to free, and 32 / (34 + 5 a s / h) where attention matrices are
stored (arXiv 2401.10241, section 4.1: a heads, sequence length s, hidden size h).
"""

from collections.abc import Iterable
from typing import NamedTuple

from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan


class Held(NamedTuple):
    """What a rank holds, or may hold.

    Attributes:
        activations: activations of one chunk.
        exponentials: microbatches of the output layer between S and T.
        embeddings: microbatches of the input layer between IF and the F of chunk 0.
    """

    activations: float
    exponentials: float
    embeddings: float


def held_changes(plan: Plan, item: Pass, kept: float = 1.0) -> Held:
    """Return by how much ``item`` changes what its rank holds.

    Args:
        plan: tells whether the backward is split, and whether the vocabulary is.
        item: any pass of the plan.
        kept: share of a microbatch's activations that stays from B to W.
    """
    after_backward = kept if plan.split_backward else 0.0
    activations = {"F": 1.0, "B": after_backward - 1.0, "W": -after_backward}.get(item.kind, 0.0)
    return Held(
        activations,
        (item.kind == "S") - (item.kind == "T"),
        (item.kind == "IF") - (item.kind == "F" and item.chunk == 0 and plan.treatment.is_sharded),
    )


def peak_held(plan: Plan, row: Iterable[Pass], kept: float = 1.0) -> Held:
    """Return the peaks of what a rank with this ``row`` holds, each by itself."""
    known: dict[tuple[str, int], list[tuple[int, float]]] = {}
    held, peaks = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
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
    """Return every rank's peak of microbatches whose activations it holds.

    A chunk counts as its share 1/v of the rank's layers.
    """
    return [peak_held(plan, row, kept).activations / plan.chunks for row in plan.rows]
