"""Which layers of a model have a property, as the words of a flag give it."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

_MOST_ENTRIES: Final = 100_000
"""Entries of the longest pattern of layers; a longer pattern is refused."""

_PLAIN: Final = 20
"""Characters of the longest list of entries that is written out."""


@dataclass(frozen=True)
class LayerPattern:
    """Every N-th layer, or the layers with 1 in a list.

    Attributes:
        every: N; 0: the layers are listed.
        listed: for every layer 1 or 0. A shorter list repeats over the layers, which is a form of
            checkpoints and of models of other projects; words always have an entry for each layer.
    """

    every: int = 0
    listed: tuple[int, ...] = ()

    @classmethod
    def read(cls, words: str) -> "LayerPattern":
        """Return the pattern of some words: N, or a Python list of 0 and 1.

        Raises:
            ValueError: the words are neither.
        """
        if words.isdecimal() and int(words):
            return cls(every=int(words))
        try:
            entries = _evaluate(ast.parse(words, mode="eval").body)
        except (SyntaxError, ValueError):
            entries = None
        if not isinstance(entries, list) or not entries or not set(entries) <= {0, 1}:
            raise ValueError(
                "give a number N, for every N-th layer, or a list of 0 and 1 with an entry for "
                "each layer, as in '[1,1,0]*8'"
            )
        return cls(listed=tuple(entries))

    @classmethod
    def of(cls, entries: Sequence[int], last: int, first: bool = False) -> "LayerPattern":
        """Return the shortest pattern with some entries.

        Args:
            entries: for every layer 1 or 0.
            last: entry of every N-th layer, as in ``entry``.
            first: as in ``entry``.
        """
        places = [place for place, entry in enumerate(entries) if entry == last]
        if first and places[:1] == [0]:  # N is the distance to the next such layer, if there is one
            every = places[1] if len(places) > 1 else len(entries)
        else:
            every = 0 if first or not places else places[0] + 1
        one = cls(every=every)
        if every and all(one.entry(i, last, first) == own for i, own in enumerate(entries)):
            return one
        return cls(listed=tuple(entries))

    def __str__(self) -> str:
        """The words of the pattern, which ``read`` reads.

        A long list is written by its runs, as ``[0]*3+[1]*58``, or by its period, as ``[0,1]*24``.
        """
        if self.every:
            return str(self.every)
        plain = _listed(self.listed)
        if len(plain) <= _PLAIN:
            return plain
        runs = [(value, len(list(same))) for value, same in groupby(self.listed)]
        by_runs = "+".join(f"[{one}]*{times}" if times > 1 else f"[{one}]" for one, times in runs)
        size, entries = len(self.listed), list(self.listed)
        period = next(n for n in range(1, size + 1) if entries[n:] == entries[:-n])
        if size % period:
            return min(plain, by_runs, key=len)
        return min(plain, by_runs, f"{_listed(entries[:period])}*{size // period}", key=len)

    def entry(self, layer: int, last: int = 1, first: bool = False) -> int:
        """Return the entry of a layer, 1 or 0.

        Args:
            layer: index in the whole model, from 0.
            last: entry of every N-th layer, if the pattern is a number N; other layers have
                1 - ``last``.
            first: of each N layers, the first one has the entry ``last``, not the last one.
        """
        if not self.every:
            return self.listed[layer % len(self.listed)]
        place = 0 if first else self.every - 1
        return last if layer % self.every == place else 1 - last

    def fault(self, num_layers: int) -> str | None:
        """Return why the pattern does not fit a number of layers; ``None``: it does."""
        if self.every > num_layers:
            return (
                f"is beyond the last of {num_layers} layers: leave it out, or give a smaller number"
            )
        if not self.every and len(self.listed) != num_layers:
            return f"has {len(self.listed)} entries for {num_layers} layers: give one for each"
        return None


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
