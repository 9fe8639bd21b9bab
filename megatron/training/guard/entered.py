"""Which collectives the ranks have entered, and which ranks are missing in them.

PyTorch's flight recorder keeps the last 2,000 collectives of a process, over all its groups. Each
group numbers its collectives, and its ranks call the same ones in the same order. So a rank whose
last number is lower than the number of a collective that others wait in has not entered it.

A host enters NCCL's collectives ahead of its GPU: that all ranks have entered one does not mean
that all GPUs have reached it. Where the GPUs are is told by their places (``places``).
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import torch

from megatron.parallel.groups import ConnectedAxis, Groups
from megatron.training.words import ranks_in_words

WAITED_FOR: Final = frozenset(
    {"tensor", "context", "context_heads", "context_ring", "experts", "expert_tensor"}
)
"""The axes of ``Groups`` for whose collectives a pass waits within itself."""

_USUAL_SIZE: Final = "2000"
"""Collectives that a recorder keeps if TORCH_FR_BUFFER_SIZE says nothing else."""

_DUMPS: Final = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""PyTorch's functions that return what the recorders of NCCL and of the other backends keep."""


@dataclass(frozen=True)
class Entered:
    """How far a rank has come in the collectives of one process group.

    Attributes:
        group: name of the process group, the same on all of its ranks.
        axis: the axis of ``Groups`` that the group connects.
        number: of the last collective that the rank has entered; 0: none.
        unfinished: number of the first collective that the rank has entered and not left; 0: none.
        operation: that collective, as in ``all_reduce``; empty if there is none.
        ranks: the ranks of the job in the group, if a collective is unfinished, else none.
    """

    group: str
    axis: str
    number: int
    unfinished: int = 0
    operation: str = ""
    ranks: Sequence[int] = ()

    def values(self) -> dict[str, Any]:
        """Return the values, to be written as JSON, in few bytes: thousands of ranks answer."""
        return {**vars(self), "ranks": _Span.of(self.ranks)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Entered":
        """Return the instance with some ``values``."""
        return cls(**{**values, "ranks": _Span(*values["ranks"]).ranks()})


class _Span(NamedTuple):
    """Ranks as JSON has them: a range if they are equally far apart, else a list (``others``)."""

    begin: int
    end: int
    step: int
    others: Sequence[int] = ()

    @classmethod
    def of(cls, ranks: Sequence[int]) -> "_Span":
        begin = ranks[0] if ranks else 0
        step = max(1, ranks[1] - begin) if len(ranks) > 1 else 1
        span = range(begin, begin + step * len(ranks), step)
        if tuple(span) == tuple(ranks):
            return cls(span.start, span.stop, span.step)
        return cls(0, 0, 1, ranks)

    def ranks(self) -> tuple[int, ...]:
        return tuple(self.others) or tuple(range(self.begin, self.end, self.step))


def entered_by(groups: Groups) -> tuple[Entered, ...]:
    """Return how far this rank has come in its groups; of a group that is not known, nothing.

    A group is not known if the recorder is full and has dropped all that it had of the group, or if
    there is no recorder.
    """
    recorded, found = [*_recorded()], defaultdict[str, list[Mapping[str, Any]]](list)
    for entry in recorded:
        if not entry["is_p2p"]:
            found[entry["process_group"][0]].append(entry)
    is_whole = 0 < len(recorded) < int(os.environ.get("TORCH_FR_BUFFER_SIZE", _USUAL_SIZE))
    return tuple(
        _entered(name, axis, ranks, found.get(name, ()))
        for name, (axis, ranks) in _axes(groups).items()
        if is_whole or name in found
    )


def _entered(
    group: str, axis: str, ranks: tuple[int, ...], entries: Sequence[Mapping[str, Any]]
) -> Entered:
    number = max((int(entry["collective_seq_id"]) for entry in entries), default=0)
    open_ = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    if not open_:
        return Entered(group, axis, number)
    first = min(open_, key=lambda entry: int(entry["collective_seq_id"]))
    operation = str(first["profiling_name"]).rpartition(":")[2]
    return Entered(group, axis, number, int(first["collective_seq_id"]), operation, ranks)


def _axes(groups: Groups) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Return the axes with a process group by the name of the group, the first of equal ones."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for own in fields(groups):
        axis = getattr(groups, own.name)
        if isinstance(axis, ConnectedAxis) and axis.group is not None:
            found.setdefault(axis.group.group_name, (own.name, axis.ranks))
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
    by_group = defaultdict[str, dict[int, Entered]](dict)
    for rank, groups in entered.items():
        for own in groups:
            by_group[own.group][rank] = own
    for known in by_group.values():
        waiting = [own for own in known.values() if own.unfinished]
        if waiting:
            yield _in_words(min(waiting, key=lambda own: own.unfinished), known)


def _in_words(first: Entered, known: Mapping[int, Entered]) -> str:
    number = first.unfinished
    absent = [rank for rank in first.ranks if rank in known and known[rank].number < number]
    unknown = [rank for rank in first.ranks if rank not in known]
    called = defaultdict[str, list[int]](list)
    for rank, own in sorted(known.items()):
        if own.unfinished == number:
            called[own.operation].append(rank)
    words = " and ".join(
        f"{ranks_in_words(own)} in {operation}" for operation, own in called.items()
    )
    axis = first.axis.replace("_", " ")
    said = f"collective {number} of the {axis} axis ({ranks_in_words(first.ranks)}): {words}"
    if absent:
        said += f"; {ranks_in_words(absent)} {'has' if len(absent) == 1 else 'have'} not entered it"
    elif len(called) > 1:
        said += ": these do not match"
    elif not unknown:
        said += "; all have entered it"
    return said + (f"; {ranks_in_words(unknown)}: not known" if unknown else "")


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
    found = set[int]()
    for own in waiting:
        if in_pass and own.axis not in WAITED_FOR:
            continue
        for other in own.ranks:
            numbers = [each.number for each in entered.get(other, ()) if each.group == own.group]
            if numbers and numbers[0] < own.unfinished:
                found.add(other)
    return tuple(sorted(found))
