"""Counts few slices of a microbatch, and takes the counts of the others from the line through them.

Every further slice of the same length sees one slice of keys more. So the numbers of a count, such
as FLOPs and bytes, grow by the same amount from each slice to the next. The first and the last
slice are different: the first one takes buffers, which its backward frees, and no slice after the
last one has left gradients of its keys. Therefore the first two slices, the last two slices and one
slice in the middle are counted. The slice in the middle tests the line: its count must be on the
line from the second slice to the last but one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, TypeVar

from megatron.planning.count.recorder import GRANULE
from megatron.simulator.costs.count import PassCount, RankCount, Segment, Work

Sliced = TypeVar("Sliced", Segment, RankCount)

_COUNTED: Final = 5
"""Slices that are counted if there are more of them."""


def count_few(count: Callable[[Sequence[int]], Sliced], lengths: Sequence[int]) -> Sliced:
    """Return the count of a microbatch, for which as few slices as possible are counted.

    All slices are counted if their lengths differ, or if their counts are not on a line. For
    example, with a window of attention the counts grow only up to some slice.

    Args:
        count: returns the count of a microbatch with the slices of the given numbers alone.
        lengths: tokens of every slice; empty: the microbatch is whole.
    """
    number = len(lengths)
    if number <= _COUNTED or len(set(lengths)) > 1:
        return count(range(number or 1))
    found = count([0, 1, number // 2, number - 2, number - 1])
    first, second, between, last_but_one, last = found.slices
    line: list[Any]
    try:
        line = [_on_line(second, last_but_one, at, number - 3) for at in range(number - 2)]
    except _NoLineError:
        return count(range(number))
    if line[number // 2 - 1] != between:
        return count(range(number))
    return found.with_slices([first, *line, last])


class _NoLineError(Exception):
    """Two counts have other steps, or no equal whole steps lead from one to the other."""


def _on_line(start: Any, end: Any, at: int, steps: int) -> Any:
    """Return the count after ``at`` of the ``steps`` equal steps that lead from a count to another.

    Names, kinds and the number of parts must be equal in both counts, and all numbers are integers.

    Raises:
        _NoLineError: there is no such count.
    """
    if start == end:
        return start
    if isinstance(start, int) and isinstance(end, int):
        step, rest = divmod(end - start, steps)
        if not rest:
            return start + at * step
    elif type(start) is not type(end):
        pass
    elif isinstance(start, tuple) and len(start) == len(end):
        parts = [_on_line(own, other, at, steps) for own, other in zip(start, end, strict=True)]
        return start._make(parts) if hasattr(start, "_make") else tuple(parts)
    elif isinstance(start, Mapping) and start.keys() == end.keys():
        return {key: _on_line(own, end[key], at, steps) for key, own in start.items()}
    elif isinstance(start, PassCount):
        return PassCount.joined(_on_line(start.parts, end.parts, at, steps))
    elif is_dataclass(start):
        return _of_fields(start, end, at, steps)
    raise _NoLineError


def _of_fields(start: Any, end: Any, at: int, steps: int) -> Any:
    """Return the dataclass with every field on its line; a peak is the largest height there.

    Raises:
        _NoLineError: a field has no line; or memory on the line is not in whole granules, so that
            the rounding of a tensor's size differs from slice to slice.
    """
    found = {
        own.name: _on_line(getattr(start, own.name), getattr(end, own.name), at, steps)
        for own in fields(start)
        if own.name != "peak"
    }
    if isinstance(start, Work):
        if any(size % GRANULE for size in (found["left"], found["moved"], *found["heights"])):
            raise _NoLineError
        found["peak"] = max((0, *found["heights"]))
    return type(start)(**found)
