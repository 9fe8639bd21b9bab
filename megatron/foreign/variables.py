"""Follows what commands make of a script's variables: assignments, declare, read and others."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from megatron.foreign.assigned import ASSIGNED, PLACES, assigned_in
from megatron.foreign.expand import Expander
from megatron.foreign.sourced import Sources
from megatron.foreign.statements import Block
from megatron.foreign.sums import value_of_sum
from megatron.foreign.tokens import Word
from megatron.foreign.values import HOLE, Array, Hole, Holes, Scope, is_ambient

_WITH_KINDS: Final = frozenset({"declare", "typeset", "local"})


class Variables:
    """Changes the variables of a script as its commands do.

    Args:
        own: variables that are set before the script begins.
        given: values from the command line, which no command changes.
        sources: the files that are read.
    """

    def __init__(
        self, own: dict[str, str | Array], given: dict[str, str], sources: Sources
    ) -> None:
        self._expander = Expander(Scope(own), Holes(), given, tell=self._note)
        self._given = given
        self._sources, self._from, self._offset = sources, 0, 0
        """The files that are read, the line of the script that asks for the open one, and the lines
        before the text that is read."""
        self._functions: dict[str, Block] = {}
        self._notes: dict[str, int] = {}
        self._exported: dict[str, None] = {}
        self._kinds: dict[str, str] = {}
        """Letters of declare -i, -l, -n and -u by the variables whose values they change."""
        self._locals: list[dict[str, str | Array | None]] = []
        """For each function that is being read, the outer values of its local variables."""

    @property
    def _scope(self) -> Scope:
        return self._expander.scope

    def _note(self, line: int, text: str) -> None:
        line += self._offset
        within = self._sources.reading
        where = f"line {line}" if within is None else f"{within}, line {line}"
        self._notes.setdefault(f"{where}: {text}", self._from or line)

    def _declare(self, name: str, words: Sequence[Word]) -> None:
        letters = "".join(word.plain or "" for word in words if word.source.startswith("-"))
        kinds = "".join(sorted(set(letters) & set("ilnu"))) if name in _WITH_KINDS else ""
        is_local = name in _WITH_KINDS and "g" not in letters and bool(self._locals)
        for word in words:
            own = word.source.partition("=")[0].rstrip("+")
            if is_local and own.isidentifier() and own not in self._given:
                self._locals[-1].setdefault(own, self._scope.values.get(own))
                if not ASSIGNED.match(word.source):
                    self._scope.values.pop(own, None)
            if kinds and own.isidentifier():
                self._kinds[own] = kinds
            if "n" in kinds:  # a second name of the variable behind =
                other = self._expander.text(word).partition("=")[2]
                self._kinds[other] = kinds
                self._expander.forget((other,), word.line, f"declare -n {own}")
            if ASSIGNED.match(word.source):
                self._assign(word)
            if name == "export" and own.isidentifier():
                self._exported.setdefault(own)

    def _assigned_in(self, block: Block) -> dict[str, bool]:
        """Return the variables that statements may assign, as ``assigned_in``."""
        return assigned_in(block, self._functions, self._expander.budget.look)

    def _forget_all(self, names: Mapping[str, bool], line: int, by: str) -> None:
        """Make variables unknown; flags to which more are appended stay, with a hole behind them.

        Args:
            names: the variables, each with whether it is only appended to.
            line: number of the line in which they are assigned.
            by: the command that assigns them, for the note.
        """
        before = {name: self._scope.values.get(name) for name, more in names.items() if more}
        self._expander.forget(names, line, by)
        for name, value in before.items():
            hole = self._scope.values.get(name)
            if not isinstance(hole, str) or name in self._given:
                continue
            if isinstance(value, dict) and "--" in " ".join(value.values()):
                self._scope.values[name] = {**value, str(len(value)): hole}
            elif isinstance(value, str) and "--" in value:
                self._scope.values[name] = f"{value} {hole}"
        if PLACES in names:
            scope = self._scope
            if scope.places:
                self._note(line, f"{by}: $1 and so on are not known behind it, and $@ is left out")
            scope.places, scope.has_places = (), False
            for name in [n for n in scope.values if n.isdigit() and n not in self._given]:
                scope.values.pop(name)

    def _assign(self, word: Word) -> None:
        """Follow an assignment, unless the command line gives the variable."""
        found = ASSIGNED.match(word.source)
        assert found is not None, "the caller has looked"
        name, at, is_more = found[1], found[2], bool(found[3])
        if name in self._given:
            self._expander.used.add(name)
            return
        values, before = self._scope.values, self._scope.values.get(name)
        if word.elements is not None:
            own = self._expander.array(word.elements)
            if is_more and before is not None:
                base = {"0": before} if isinstance(before, str) else dict(before)
                count = len(base)
                moved = {str(int(k) + count) if k.isdigit() else k: v for k, v in own.items()}
                own = base | moved
            values[name] = own
            return
        text = self._assigned_text(word, name)
        if name in self._kinds:
            self._converted(name, text, word, is_plain=at is None and not is_more)
            return
        text = self._expander.named(name, text, word.line)
        if at is not None:
            array = dict(before) if isinstance(before, dict) else {}
            key = self._expander.argument(at, word.line).strip("\"'")
            array[key] = array.get(key, "") * is_more + text
            values[name] = array
        elif isinstance(before, dict):  # without a subscript, the first element is meant
            values[name] = before | {"0": before.get("0", "") * is_more + text}
        else:
            values[name] = (before if isinstance(before, str) and is_more else "") + text
            self._expander.budget.keep(word.line, f"the value of {name}", len(str(values[name])))

    def _converted(self, name: str, text: str, word: Word, *, is_plain: bool) -> None:
        """Assign a value that declare's -i computes; -l, -n and -u make the value unknown."""
        value = None
        if is_plain and self._kinds[name] == "i" and not HOLE.search(text):
            value = value_of_sum(text, self._expander.number)
        if value is None:
            self._expander.forget((name,), word.line, f"declare -{self._kinds[name]} {name}")
        else:
            self._expander.put(name, str(value))

    def _assigned_text(self, word: Word, name: str) -> str:
        """Return the text behind = of an assignment."""
        text = self._expander.text(word, own=name)
        head, equals, value = text.partition("=")
        assert equals, "an assignment has ="
        if value.startswith("~/") and not any(p.quoted for p in word.pieces):
            value = self._expander.holes.mark(Hole("$HOME", "HOME", 0)) + value[1:]
        return value if not head.count("[") or "]" in head else text.partition("]=")[2]

    def _set(self, words: list[str], line: int) -> None:
        if words and words[0] == "--":
            self._scope.places, self._scope.has_places = tuple(words[1:]), True

    def _shift(self, words: list[str], line: int) -> None:
        count = int(words[0]) if words and re.fullmatch(r"\d{1,3}", words[0]) else 1
        scope = self._scope
        scope.places = scope.places[count:]
        moved = {n: v for n, v in scope.values.items() if n.isdigit()}
        for name in moved:
            scope.values.pop(name)
        for name, value in moved.items():
            if int(name) > count:
                scope.values[str(int(name) - count)] = value

    def _unset(self, words: list[str], line: int) -> None:
        for name in words:
            if name not in self._given:
                self._scope.values.pop(name, None)

    def _read_input(self, words: list[str], line: int) -> None:
        for name in (*words, "REPLY", "OPTARG", "OPTIND"):
            if name.isidentifier() and not is_ambient(name) and name not in self._given:
                self._scope.values[name] = self._expander.holes.mark(Hole(f"${name}", name, line))

    def _printf(self, words: list[str], line: int) -> None:
        if words and words[0].startswith("-v"):
            name = words[0][2:] or "".join(words[1:2])
            self._expander.forget((name.partition("[")[0],), line, f"printf -v {name}")

    def _let(self, words: list[str], line: int) -> None:
        for word in words:
            self._expander.computed(word, line)
