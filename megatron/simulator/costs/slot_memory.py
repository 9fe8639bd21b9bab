"""The memory of slots of captured passes, from the counts of the passes and from a rank's row.

A slot serves one microbatch at a time, and is never given back. So a rank has as many slots of a
kind as microbatches occupy at a time, and holds all of them at all times.
"""

from collections.abc import Iterator

from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.costs.count import InSlot, RankCount, joined_in_slots

_IN_ORDER: tuple[PassKind, ...] = ("IF", "F", "S", "T", "B", "W", "IB")
"""Kinds of passes in the order in which a microbatch runs them. T of a vocabulary that is not split
is a part of B or W."""


def slot_bytes(plan: Plan, count: RankCount, rank: int) -> float:
    """Return the bytes of all slots of a rank; 0 if no pass is captured."""
    return sum(
        _most(plan, rank, own.slot, chunk) * (own.lasting + own.peak)
        for chunk, own in _slots(plan, count)
    )


def _slots(plan: Plan, count: RankCount) -> Iterator[tuple[int, InSlot]]:
    """Yield every kind of slot with its chunk, and all that a microbatch does in it."""
    for chunk in range(plan.chunks):
        ordered = (count.passes.get((kind, chunk)) for kind in _IN_ORDER)
        parts = [own for one in ordered if one is not None for own in one.slots]
        for own in joined_in_slots(parts):
            yield chunk, own


def _most(plan: Plan, rank: int, slot: str, chunk: int) -> int:
    """Return how many slots of a kind are occupied at a time, at most."""
    if slot == "input":
        return 1  # which keeps nothing between passes
    takes, frees = _kinds(plan, slot)
    now = most = 0
    for item in plan.rows[rank]:
        if item.chunk == chunk:
            now += _is(item, takes) - _is(item, frees)
            most = max(most, now)
    return most


def _kinds(plan: Plan, slot: str) -> tuple[PassKind, PassKind]:
    """Return the passes that take and free a slot."""
    if slot == "output" and plan.treatment.is_sharded:
        return "S", "T"
    return "F", "W" if plan.split_backward else "B"


def _is(item: Pass, kind: PassKind) -> int:
    return int(item.kind == kind)
