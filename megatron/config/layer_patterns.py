"""Reads the words of ``--window-size`` and of the flags that give a pattern of layers."""

import ast
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from megatron.model.config import Pattern

_MOST_ENTRIES: Final = 100_000
"""Entries of the longest pattern of layers; a longer pattern is refused."""

_PLAIN: Final = 20
"""Characters of the longest list of entries that is written out."""


def parse_window(words: str | None) -> int | None:
    """Return the number of earlier positions that a position sees; ``None``: all of them.

    Raises:
        ValueError: the words are not two numbers, or a position would see later positions.
    """
    if words is None:
        return None
    found = re.fullmatch(r"\(?(\d+), ?(\d+)\)?", words)
    if found is None:
        raise ValueError(f"--window-size {words}: give two numbers, as in 4096,0")
    if int(found[2]):
        raise ValueError(
            f"--window-size {words}: a position of a GPT sees no later ones; give {found[1]},0"
        )
    return int(found[1])


def parse_pattern(option: str, words: str | None, last: int, num_layers: int) -> Pattern:
    """Return a pattern of 0 and 1 that repeats over the layers; empty if no words are given.

    Args:
        option: the flag that gives the pattern.
        words: N, or a Python list of 0 and 1 with one entry for each layer.
        last: entry of every N-th layer, if the words are N; the other layers have 1 - ``last``.
        num_layers: layers of the model.

    Raises:
        ValueError: the words are neither, or do not fit the number of layers.
    """
    if words is None:
        return ()
    if words.isdecimal() and int(words):
        if int(words) > num_layers:
            raise ValueError(
                f"{option} {words} is beyond the last of {num_layers} layers: leave it out, or "
                "give a smaller number"
            )
        return (1 - last,) * (int(words) - 1) + (last,)
    try:
        entries = _evaluate(ast.parse(words, mode="eval").body)
    except (SyntaxError, ValueError):
        entries = None
    if not isinstance(entries, list) or not set(entries) <= {0, 1}:
        raise ValueError(
            f"{option} {words}: give a number N, for every N-th layer, or a list of 0 and 1 with "
            "an entry for each layer, as in '[1,1,0]*8'"
        )
    if len(entries) != num_layers:
        raise ValueError(
            f"{option} {words} has {len(entries)} entries for {num_layers} layers: give one for "
            "each"
        )
    return tuple(entries)


def words_of_pattern(pattern: Sequence[int]) -> str:
    """Return the words of a pattern with an entry for each layer, which ``parse_pattern`` reads.

    A long list is written by its runs, as ``[0]*3+[1]*58``, or by its period, as ``[0,1]*24``.
    """
    plain = _listed(pattern)
    if len(plain) <= _PLAIN:
        return plain
    runs = [(value, len(list(same))) for value, same in groupby(pattern)]
    by_runs = "+".join(f"[{value}]*{times}" if times > 1 else f"[{value}]" for value, times in runs)
    size = len(pattern)
    period = next(n for n in range(1, size + 1) if list(pattern[n:]) == list(pattern[:-n]))
    if size % period:
        return min(plain, by_runs, key=len)
    return min(plain, by_runs, f"{_listed(pattern[:period])}*{size // period}", key=len)


def _listed(pattern: Sequence[int]) -> str:
    return f"[{','.join(map(str, pattern))}]"


def _evaluate(node: ast.expr) -> list[int] | int:
    """Return the value of a list of numbers, or of a sum or a multiple of such lists."""
    if isinstance(node, ast.List):
        return [_number(entry) for entry in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, int) != isinstance(right, int):
            entries, times = (left, right) if isinstance(left, list) else (right, left)
            assert isinstance(entries, list)
            assert isinstance(times, int)
            if len(entries) * times <= _MOST_ENTRIES:
                return entries * times
        raise ValueError("no list of a pattern")
    return _number(node)


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("no number")
