"""Joins the variables of branches of which a reader cannot know which one a run would take."""

import shlex
from collections.abc import Sequence

from megatron.foreign.values import Array, Hole, Holes, Scope

Value = str | Array | None


class Merging:
    """Joins scopes, and remembers for the user how.

    Attributes:
        unsure: variables whose value depends on the branch.
        first: variables to which several branches give flags; the first branch counts.
        joined: variables to which one branch gives flags, which count.
    """

    def __init__(self, holes: Holes, line: int) -> None:
        self._holes, self._line = holes, line
        self.unsure: list[str] = []
        self.first: list[str] = []
        self.joined: list[str] = []

    def merged(self, before: Scope, scopes: Sequence[Scope]) -> Scope:
        """Return one scope for the scopes behind all branches.

        Args:
            before: the variables before the branches.
            scopes: the variables behind each branch; there is one at least.
        """
        result = scopes[0].copy()
        for name in dict.fromkeys(name for scope in scopes for name in scope.values):
            values = [scope.values.get(name) for scope in scopes]
            if all(value == values[0] for value in values):
                continue
            made = self._merged(name, before.values.get(name), values)
            if made is None:
                result.values.pop(name, None)
            else:
                result.values[name] = made
        return result

    def _merged(self, name: str, before: Value, values: list[Value]) -> Value:
        if any(isinstance(value, dict) for value in (before, *values)):
            return self._merged_arrays(name, before, values)
        texts = [value if isinstance(value, str) else "" for value in values]
        if not any(map(str.strip, texts)):  # empty and not set are alike
            return ""
        base = before if isinstance(before, str) else ""
        are_flags = any(_options(text) for text in texts)
        if are_flags and all(text == "" or text.startswith(base) for text in texts):
            added = [text.removeprefix(base) for text in texts]
            taken = self._taken(name, [_options(text) for text in added])
            return base + " ".join(added[place] for place in taken if added[place])
        self.unsure.append(name)
        choices = tuple(dict.fromkeys(self._holes.shown(text) for text in texts if text))
        return self._holes.mark(Hole(f"${name}", name, self._line, choices))

    def _merged_arrays(self, name: str, before: Value, values: list[Value]) -> Value:
        base = list(before.values()) if isinstance(before, dict) else []
        lists = [list(value.values()) if isinstance(value, dict) else [] for value in values]
        added = [own[len(base) :] if own[: len(base)] == base else own for own in lists]
        taken = self._taken(name, [_options(" ".join(own)) for own in added])
        words = [*base, *(word for place in taken for word in added[place])]
        return {str(place): word for place, word in enumerate(words)}

    def _taken(self, name: str, options: list[set[str]]) -> list[int]:
        """Return the branch whose flags are taken: the only one that has any, or the first."""
        given = [place for place, own in enumerate(options) if own]
        (self.joined if len(given) == 1 else self.first).append(name)
        return given[:1]


def _options(text: str) -> set[str]:
    """Return the flags in a text."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    return {word.split("=")[0] for word in words if word.startswith("--")}
