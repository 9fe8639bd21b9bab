"""Replaces variables in words, as the shell does, and leaves holes for values of a run alone.

No command is run: ``$(...)`` is a hole. A variable that the script does not set is a hole too. In a
test, and behind ``:-``, it counts as not set, as in a shell without it.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from megatron.foreign.faults import DEEPEST, ScriptError
from megatron.foreign.patterns import changed
from megatron.foreign.sums import assigned_by, assignment_of, value_of_sum
from megatron.foreign.tokens import Piece, Word
from megatron.foreign.values import (
    HOLE,
    Array,
    Budget,
    Hole,
    Holes,
    Scope,
    is_ambient,
    is_hole,
)
from megatron.foreign.words import LONGEST_SUM, pieces_of

_PARAMETER: Final = re.compile(
    r"(?P<mark>[!#]?)(?P<name>[A-Za-z_]\w*|[0-9]+|[#?$!@*-])(?:\[(?P<at>[^\]]*)\])?(?P<rest>.*)",
    re.DOTALL | re.ASCII,
)
_DEFAULT: Final = re.compile(r"(:?)([-=?+])(.*)", re.DOTALL)
_BRACES: Final = re.compile(r"\{[^{}\s]*(,|\.\.)[^{}\s]*\}")


@dataclass
class Expander:
    """Replaces variables by the values of a scope.

    Attributes:
        scope: the variables at this place of the script.
        holes: all holes of the script.
        given: values from the command line, by the variable or the text of a command.
        budget: counts the work.
        assumed: variables that counted as not set, with the line in which this mattered.
        defaults: values that the script itself gives variables that are not set.
        used: names of ``given`` that the script has.
        tell: takes a note and its line.
    """

    scope: Scope
    holes: Holes
    given: dict[str, str]
    budget: Budget = field(default_factory=Budget)
    assumed: dict[str, int] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    tell: Callable[[int, str], None] = lambda line, text: None
    _depth: int = 0

    def fields(self, word: Word) -> list[str]:
        """Return the words that a word becomes: none, one or several."""
        if (plain := word.plain) is not None and _BRACES.search(plain):
            return [self.holes.mark(Hole(plain, "", word.line))]
        made = _Fields()
        if not any(p.text or p.kind != "text" for p in word.pieces):
            return [""] * any(piece.quoted for piece in word.pieces)
        for place, piece in enumerate(word.pieces):
            several = self._several(piece)
            if several == [] and not any(p.text for p in word.pieces if p is not piece):
                return []
            if several is not None:
                made.several(several)
            elif piece.kind == "text" or piece.quoted:
                text = self._home(piece) if place == 0 else piece.text
                made.add(text if piece.kind == "text" else self._value(piece, word.line))
            else:
                made.split(self._value(piece, word.line))
        return made.done

    def text(self, word: Word, *, own: str = "", is_test: bool = False) -> str:
        """Return the text of a word, not split.

        Args:
            word: the word.
            own: the variable to which the text is assigned, which may be part of it.
            is_test: whether the text stands in a test, where a variable may be not set.
        """
        return self._text(word.pieces, word.line, own, is_test=is_test)

    def _text(
        self, pieces: tuple[Piece, ...], line: int, own: str = "", *, is_test: bool = False
    ) -> str:
        made = []
        for place, piece in enumerate(pieces):
            if piece.kind == "text":
                made.append(self._home(piece) if place == 0 else piece.text)
            elif (several := self._several(piece)) is not None:
                made.append(" ".join(several))
            else:
                made.append(self._value(piece, line, own, is_test=is_test))
        text = "".join(made)
        self.budget.keep(line, f"the value of {own}" if own else "a word", len(text))
        return text

    def _home(self, piece: Piece) -> str:
        """Return a text with the folder of the user in place of ~."""
        if piece.quoted or not re.match(r"~(/|$)", piece.text):
            return piece.text
        return self.holes.mark(Hole("$HOME", "HOME", 0)) + piece.text[1:]

    def _several(self, piece: Piece) -> list[str] | None:
        """Return the values of "${A[@]}" or "$@"; ``None``: the piece is neither of them."""
        if piece.kind != "variable" or not piece.quoted:
            return None
        name = piece.text.removesuffix("[@]")
        is_all = piece.text == "@" or (name != piece.text and name.isidentifier())
        return self.scope.all_of(name) if is_all else None

    def _value(self, piece: Piece, line: int, own: str = "", *, is_test: bool = False) -> str:
        """Return the value of a variable, a command or a sum."""
        if self._depth > DEEPEST:
            raise ScriptError(line, f"more than {DEEPEST} levels of ${{...}}: simplify it")
        self._depth += 1
        if piece.kind == "variable":
            value = self._parameter(piece, line, own, is_test=is_test)
        elif piece.kind == "sum":
            value = self._sum(piece, line)
        else:
            value = self._unknown(piece.source, line)
        self._depth -= 1
        self.budget.keep(line, piece.source[:40], len(value))
        return value

    def _unknown(self, source: str, line: int) -> str:
        """Return the value that the command line gives a command of the script; else a hole."""
        own = " ".join(source.split())
        if own in self.given:
            self.used.add(own)
            return self.given[own]
        return self.holes.mark(Hole(own, "", line))

    def _sum(self, piece: Piece, line: int) -> str:
        found = self.computed(piece.text, line)
        return self._unknown(piece.source, line) if found is None else str(found)

    def computed(self, text: str, line: int) -> int | None:
        """Return the value of ((...)), and follow its assignments.

        Returns:
            The value; ``None``: it is not known, or the expression assigns something.
        """
        has_inner = "${" in text or "$(" in text or "[" in text
        inside = self._text(pieces_of(text, line), line) if has_inner else text
        is_known = not HOLE.search(inside) and len(inside) <= LONGEST_SUM
        names = assigned_by(inside)
        if not names:
            return value_of_sum(inside, self.number) if is_known else None
        one = assignment_of(inside) if is_known else None
        value = None if one is None else value_of_sum(one[1], self.number)
        if value is not None and not isinstance(self.scope.values.get(names[0]), dict):
            self.put(names[0], str(value))
        else:
            self.forget(names, line, f"(({' '.join(text.split())}))")
        return None

    def put(self, name: str, value: str) -> None:
        """Give a variable a value, unless the command line gives the variable."""
        if name in self.given:
            self.used.add(name)
        else:
            self.scope.values[name] = value

    def forget(self, names: Iterable[str], line: int, by: str) -> None:
        """Make variables unknown, unless the command line gives them, and tell this.

        Args:
            names: the variables.
            line: number of the line in which they are assigned.
            by: the command that assigns them, for the note.
        """
        told = []
        for name in dict.fromkeys(names):
            if is_ambient(name):
                self.scope.values.pop(name, None)
            elif name.isidentifier() and name not in self.given:
                self.scope.values[name] = self.holes.mark(Hole(f"${name}", name, line))
                told.append(name)
        if told:
            ways = " ".join(f"--set {name}=VALUE" for name in told)
            self.tell(line, f"{by}: not followed; give what it assigns by {ways}")

    def number(self, name: str) -> int | None:
        """Return the whole number of a variable, or ``None``: it is not known."""
        value = self.scope.get(name)
        if value is None or not re.fullmatch(r"\s*-?(0|[1-9]\d{0,17})\s*", value, re.ASCII):
            return None  # a number that begins with a zero is octal
        return int(value)

    def condition(self, text: str, line: int) -> bool | None:
        """Return whether ((...)) holds; ``None``: it is not known."""
        found = self.computed(text, line)
        return None if found is None else bool(found)

    def _parameter(self, piece: Piece, line: int, own: str, *, is_test: bool) -> str:
        """Return the value of $NAME or ${...}."""
        found = _PARAMETER.fullmatch(piece.text)
        if found is None or found["mark"] == "!":
            return self._unknown(piece.source, line)
        name, rest = found["name"], found["rest"]
        if found["mark"] == "#" and name and not rest:
            return self._length(name, found["at"], piece, line)
        value = self._looked_up(name, found["at"], line)
        if chosen := _DEFAULT.fullmatch(rest):
            return self._default(name, value, chosen, piece, line, is_test=is_test)
        if value is None:
            return self._unset(name, line, own, is_test=is_test)
        if not rest:
            return value
        made = (
            None if HOLE.search(value) else changed(value, rest, lambda t: self.argument(t, line))
        )
        return self._unknown(piece.source, line) if made is None else made

    def argument(self, text: str, line: int) -> str:
        """Return a text with its variables replaced, without splitting it."""
        return self._text(pieces_of(text, line), line)

    def _looked_up(self, name: str, at: str | None, line: int) -> str | None:
        """Return the value of a variable or of an array's element; ``None``: it is not set."""
        if at in ("@", "*") or name in ("@", "*"):
            found = self.scope.all_of(name)
            return None if found is None else " ".join(found)
        if at is not None:
            value = self.scope.values.get(name)
            if isinstance(value, dict):
                key = self.argument(at, line)
                return value.get(key.strip("\"'"))
        if name == "#" and self.scope.has_places:
            return str(len(self.scope.places))
        return self.scope.get(name)

    def _length(self, name: str, at: str | None, piece: Piece, line: int) -> str:
        found = self.scope.all_of(name) if at in ("@", "*") else self.scope.get(name)
        if found is None or (isinstance(found, str) and HOLE.search(found)):
            return self._unknown(piece.source, line)
        return str(len(found))

    def _unset(self, name: str, line: int, own: str, *, is_test: bool) -> str:
        """Return the text in place of a variable that is not set."""
        if name == own and not is_ambient(name):
            return ""
        if is_test and not is_ambient(name) and name.isidentifier():
            self.assumed.setdefault(name, line)
            return ""
        named = name if name.isidentifier() or name.isdigit() else ""
        return self.holes.mark(Hole(f"${name}", named, line))

    def _default(
        self,
        name: str,
        value: str | None,
        chosen: re.Match[str],
        piece: Piece,
        line: int,
        *,
        is_test: bool,
    ) -> str:
        """Return the value of ${X:-Y}, ${X:=Y}, ${X:?Y} or ${X:+Y}, with or without a colon."""
        colon, operator, other = chosen.groups()
        is_set = value is not None and (value != "" or not colon)
        if operator == "+":
            return self.argument(other, line) if is_set else ""
        if is_set and value is not None:
            return value
        if operator == "?":
            return self._unset(name, line, "", is_test=is_test)
        made = self.argument(other, line)
        if operator == "=" and name.isidentifier():
            self.scope.values[name] = made
        if name.isidentifier() or name.isdigit():
            self.defaults.setdefault(name, made)
        return made

    def array(self, elements: tuple[Word, ...]) -> Array:
        """Return the values of ``NAME=(...)``."""
        found: Array = {}
        for word in elements:
            key = re.match(r"\[([^\]]+)\]=", word.source)
            if key and word.pieces[0].text.startswith("["):
                text = self.text(word)
                at, _, value = text.removeprefix("[").partition("]=")
                found[at.strip("\"'")] = value
            else:
                for value in self.fields(word):
                    found[str(len(found))] = value
        return found

    def named(self, name: str, value: str, line: int) -> str:
        """Return a value that is assigned, so that a hole of $1 or $(...) has its name."""
        unnamed = [hole for hole in self.holes.within(value) if not hole.name.isidentifier()]
        is_one_word = not re.search(r"\s", self.holes.shown(value)) or is_hole(value)
        if unnamed and is_one_word and name.isidentifier():
            return self.holes.mark(Hole(f"${name}", name, line, assigned=value))
        return value


class _Fields:
    """Words in the making."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self._open: list[str] | None = None

    @property
    def done(self) -> list[str]:
        """The words, with the last one."""
        last = [] if self._open is None else ["".join(self._open)]
        return [*self._words, *last]

    def add(self, text: str) -> None:
        """Add a text to the last word."""
        if self._open is None:
            self._open = []
        self._open.append(text)

    def split(self, text: str) -> None:
        """Add a text that is split at its blanks."""
        for part in self._parts(text):
            if part is None:
                self._close()
            else:
                self.add(part)

    def several(self, texts: list[str]) -> None:
        """Add texts that are words of their own."""
        for place, text in enumerate(texts):
            if place:
                self._close()
            self.add(text)

    def _close(self) -> None:
        if self._open is not None:
            self._words.append("".join(self._open))
        self._open = None

    @staticmethod
    def _parts(text: str) -> Iterator[str | None]:
        """Yield the words of a text, and ``None`` for the blanks."""
        for part in re.split(r"([ \t\r\n]+)", text):
            if part:
                yield None if part[0] in " \t\r\n" else part
