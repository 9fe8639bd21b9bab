"""Changes of a value within ${...}: parts cut off, replaced, or in capitals."""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Final

LONGEST: Final = 1000
"""Characters of the longest value that is compared with a pattern."""

_LONGEST_PATTERN: Final = 100

_CUT: Final = re.compile(r"(##?|%%?)(.*)", re.DOTALL)
_REPLACE: Final = re.compile(r"/(/?)((?:[^/\\]|\\.)+)(?:/(.*))?", re.DOTALL)
_PART: Final = re.compile(r":\s*(\d+|\s-\d+)(?::(\d+))?")
_CASES: Final[dict[str, Callable[[str], str]]] = {"^^": str.upper, ",,": str.lower}


def changed(value: str, change: str, expand: Callable[[str], str]) -> str | None:
    """Return a value after a change such as ``%.sh``, ``/a/b``, ``:0:3`` or ``^^``.

    Args:
        value: the value, without holes.
        change: the change, as it stands behind the variable's name.
        expand: replaces variables in a text.

    Returns:
        The new value; ``None``: the change is not known here, or would take long.
    """
    if change in _CASES:
        return _CASES[change](value)
    if found := _CUT.fullmatch(change):
        pattern = expand(found[2])
        return _cut(value, found[1], pattern) if _is_short(value, pattern) else None
    if (found := _REPLACE.fullmatch(change)) and not set(found[2]) & set("*?[\\#%"):
        old, new = expand(found[2]), expand(found[3] or "")
        if len(value) * (1 + len(new)) > LONGEST**2:
            return None
        return value.replace(old, new, -1 if found[1] else 1) if old else value
    if found := _PART.fullmatch(change):
        begin = int(found[1])
        return value[begin:] if found[2] is None else value[begin : begin + int(found[2])]
    return None


def matches(value: str, pattern: str) -> bool | None:
    """Return whether a value matches a pattern of the shell; ``None``: it would take long."""
    return fnmatchcase(value, pattern) if _is_short(value, pattern) else None


def _is_short(value: str, pattern: str) -> bool:
    return len(value) <= LONGEST and len(pattern) <= _LONGEST_PATTERN


def _cut(value: str, operator: str, pattern: str) -> str:
    """Return a value without the shortest or longest beginning or end that matches."""
    places = range(len(value) + 1)
    is_end, is_longest = operator[0] == "%", len(operator) == 2
    for place in places if is_end == is_longest else reversed(places):
        part, rest = (value[place:], value[:place]) if is_end else (value[:place], value[place:])
        if fnmatchcase(part, pattern):
            return rest
    return value
