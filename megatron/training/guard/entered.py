"""Which collectives the ranks have entered, and which ranks are missing in them.

PyTorch's flight recorder keeps the last 2,000 collectives of all process groups of a process. Each
group numbers its collectives, and its ranks call the same ones in the same order. So a rank whose
last number is lower than the number of a collective that others wait in has not entered it.

A host enters NCCL's collectives ahead of its GPU: that all ranks have entered one does not mean
that all GPUs have reached it. Where the GPUs are is told by their places (``places``).
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from megatron.parallel.groups import ConnectedAxis, Groups
from megatron.training.words import ranks_in_words

WAITED_FOR: Final = frozenset(
    {"tensor", "context", "context_heads", "context_ring", "experts", "expert_tensor"}
)
"""The axes of ``Groups`` for whose collectives a pass waits within itself."""

_DUMPS: Final = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""PyTorch's functions that return what the recorders of NCCL and of the other backends keep."""


@dataclass(frozen=True)
class Entered:
    """How far a rank has come in the collectives of one process group.

    Attributes:
        group: name of the process group, the same on all of its ranks.
        axis: the axis of ``Groups`` that the group connects.
        ranks: the ranks of the job in the group.
        number: of the last collective that the rank has entered.
        unfinished: number of the first collective that the rank has entered and not left; 0: none.
        operation: that collective, as in ``all_reduce``; empty if there is none.
    """

    group: str
    axis: str
    ranks: tuple[int, ...]
    number: int
    unfinished: int = 0
    operation: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Entered":
        """Return the instance with some values, read from JSON."""
        return cls(**{**values, "ranks": tuple(values["ranks"])})


def entered_by(groups: Groups) -> tuple[Entered, ...]:
    """Return how far this rank has come in its groups; without a recorder there is nothing."""
    axes = _axes(groups)
    found = defaultdict[str, list[Mapping[str, Any]]](list)
    for entry in _recorded():
        name = entry["process_group"][0]
        if name in axes and not entry["is_p2p"]:
            found[name].append(entry)
    return tuple(
        _entered(name, axes[name][0], axes[name][1].ranks, entries)
        for name, entries in found.items()
    )


def _entered(
    group: str, axis: str, ranks: tuple[int, ...], entries: Sequence[Mapping[str, Any]]
) -> Entered:
    number = max(int(entry["collective_seq_id"]) for entry in entries)
    open_ = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    if not open_:
        return Entered(group, axis, ranks, number)
    first = min(open_, key=lambda entry: int(entry["collective_seq_id"]))
    operation = str(first["profiling_name"]).rpartition(":")[2]
    return Entered(group, axis, ranks, number, int(first["collective_seq_id"]), operation)


def _axes(groups: Groups) -> Mapping[str, tuple[str, ConnectedAxis]]:
    """Return the axes with a process group by the name of the group, the first of equal ones."""
    found: dict[str, tuple[str, ConnectedAxis]] = {}
    for own in fields(groups):
        axis = getattr(groups, own.name)
        if isinstance(axis, ConnectedAxis) and axis.group is not None:
            found.setdefault(axis.group.group_name, (own.name, axis))
    return found


def _recorded() -> Iterator[Mapping[str, Any]]:
    """Yield the recorded collectives; none if this PyTorch has no recorder that can be read."""
    for name in _DUMPS:
        dump: Callable[[bool, bool], bytes] | None = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            yield from json.loads(dump(True, False)).get("entries", ())


def stalled(entered: Mapping[int, Sequence[Entered]]) -> Iterator[str]:
    """Yield a line on each collective that some ranks wait in, and on the ranks that do not.

    ``entered`` has the groups of the ranks that have answered.
    """
    by_group = defaultdict[tuple[str, tuple[int, ...]], dict[int, Entered]](dict)
    for rank, groups in entered.items():
        for own in groups:
            by_group[own.group, own.ranks][rank] = own
    for (_, ranks), known in by_group.items():
        number = min((own.unfinished for own in known.values() if own.unfinished), default=0)
        if number:
            yield _in_words(number, ranks, known, [rank for rank in ranks if rank in entered])


def _in_words(
    number: int, ranks: Sequence[int], known: Mapping[int, Entered], answered: Sequence[int]
) -> str:
    inside = {rank: own for rank, own in known.items() if own.unfinished == number}
    absent = [rank for rank in answered if rank not in known or known[rank].number < number]
    axis = next(iter(inside.values())).axis.replace("_", " ")
    called = defaultdict[str, list[int]](list)
    for rank, own in sorted(inside.items()):
        called[own.operation].append(rank)
    words = " and ".join(
        f"{ranks_in_words(own)} in {operation}" for operation, own in called.items()
    )
    said = f"collective {number} of the {axis} axis ({ranks_in_words(ranks)}): {words}"
    if absent:
        return f"{said}; {ranks_in_words(absent)} {_has(absent)} not entered it"
    if len(called) > 1:
        return f"{said}: these do not match"
    return f"{said}; no rank that has answered is missing"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def missed_by(
    rank: int, entered: Mapping[int, Sequence[Entered]], *, in_pass: bool
) -> tuple[int, ...]:
    """Return the ranks that have not entered a collective in which ``rank`` waits.

    Args:
        rank: a rank that has answered.
        entered: the groups of the ranks that have answered.
        in_pass: whether ``rank`` runs a pass. Then only the collectives count for which a pass
            waits; others run beside it.
    """
    waiting = [own for own in entered[rank] if own.unfinished]
    found = {
        other
        for own in waiting
        if not in_pass or own.axis in WAITED_FOR
        for other in own.ranks
        if other in entered and _number(own.group, entered[other]) < own.unfinished
    }
    return tuple(sorted(found))


def _number(group: str, entered: Sequence[Entered]) -> int:
    return next((own.number for own in entered if own.group == group), 0)
