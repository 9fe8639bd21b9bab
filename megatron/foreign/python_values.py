"""Values of a Python file that is read as data: known ones, records, and computed ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Computed:
    """A value that only a run would tell.

    Attributes:
        line: number of the line that computes it.
        text: the beginning of the expression.
    """

    line: int
    text: str


@dataclass(frozen=True)
class Early(Computed):
    """The value of a function that a block which is not followed may end early."""


@dataclass
class Record:
    """Values by name: a dict, or a class with keywords.

    Attributes:
        kind: the class as the file names it; empty for a dict.
        values: by name, those of attributes that were assigned later among them.
        base: the computed value to which attributes were assigned; ``None``: there is none.
    """

    kind: str = ""
    values: "dict[str, Value]" = field(default_factory=dict)
    base: Computed | None = None


Scalar: TypeAlias = bool | int | float | str | None
Value: TypeAlias = "Scalar | list[Any] | Record | Computed"
Names: TypeAlias = dict[str, Value]
Count: TypeAlias = Callable[[], None]


def lose(value: Value, why: Computed, count: Count) -> None:
    """Make all values computed that stand in a record or a list, at any depth.

    Args:
        value: the record or the list, which is changed; other values do not change.
        why: the statement that may have changed them.
        count: is called for every value, and may raise.
    """
    seen: set[int] = set()
    left = [value]
    while left:
        own = left.pop()
        if id(own) in seen or not isinstance(own, Record | list):
            continue
        seen.add(id(own))
        inner = list(own.values.values()) if isinstance(own, Record) else list(own)
        for _ in inner:
            count()
        left += inner
        if isinstance(own, list):
            own[:] = [why]
            continue
        own.base = why
        for name, one in own.values.items():
            if not isinstance(one, Record | list):
                own.values[name] = why


def deep_copy(value: Value, count: Count, made: dict[int, Any] | None = None) -> Value:
    """Return a value whose records and lists are others; one that stands twice is copied once.

    Args:
        value: the value.
        count: is called for every record and list, and may raise.
        made: the copies so far, by the identity of the original.
    """
    made = {} if made is None else made
    if not isinstance(value, Record | list):
        return value
    if id(value) in made:
        copy: Value = made[id(value)]
        return copy
    count()
    if isinstance(value, list):
        several = made[id(value)] = list[Any]()
        several += [deep_copy(own, count, made) for own in value]
        return several
    record = made[id(value)] = Record(value.kind, {}, value.base)
    for name, own in value.values.items():
        record.values[name] = deep_copy(own, count, made)
    return record
