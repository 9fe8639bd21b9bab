"""Reads the commands of a script: assignments are followed, and trainings are collected."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from megatron.commands.launch_scripts.expand import Expander
from megatron.commands.launch_scripts.faults import DEEPEST, ScriptError
from megatron.commands.launch_scripts.launches import (
    SHELLS,
    Launch,
    directives_of,
    launch_of,
    variables_of,
)
from megatron.commands.launch_scripts.statements import Block, Simple
from megatron.commands.launch_scripts.tokens import Word
from megatron.commands.launch_scripts.values import (
    Array,
    Hole,
    Holes,
    Scope,
    is_ambient,
)

_ASSIGNED: Final = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=", re.DOTALL | re.ASCII)
_DECLARES: Final = frozenset({"export", "declare", "typeset", "local", "readonly"})
_ENDS: Final = frozenset({"exit", "return"})
_QUIET: Final = frozenset({"echo", "printf", "cat", "mkdir", ":", "cd", "ls", "rm", "cp", "test"})
"""Commands that start no program of a training, whatever their words are."""


class Commands(ABC):
    """Reads commands one after the other; a subclass goes through the statements around them."""

    def __init__(self, text: str, given: dict[str, str]) -> None:
        directives = directives_of(text)
        told = {name: value for name, value in given.items() if name.isidentifier()}
        places = {name: value for name, value in given.items() if re.fullmatch(r"[1-9]\d?", name)}
        own: dict[str, str | Array] = {**variables_of(directives), **told, **places}
        self._expander = Expander(Scope(own), Holes(), given)
        self._directives, self._given, self._text = directives, given, text
        self._functions: dict[str, Block] = {}
        self._launches: dict[Launch, int] = {}
        self._notes: dict[str, int] = {}
        self._exported: dict[str, None] = {}
        self._others: dict[str, None] = {}
        self._wrapper: tuple[str, ...] = ()
        self._depth, self._offset = 0, 0

    @abstractmethod
    def read(self, text: str) -> None:
        """Read a text as commands."""

    @abstractmethod
    def _block(self, block: Block) -> bool:
        """Read statements; return whether the script ends in them."""

    @property
    def _scope(self) -> Scope:
        return self._expander.scope

    @contextmanager
    def _deeper(self, line: int) -> Iterator[None]:
        if self._depth >= DEEPEST:
            raise ScriptError(line, f"more than {DEEPEST} levels of calls: is one without end?")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _note(self, line: int, text: str) -> None:
        line += self._offset
        self._notes.setdefault(f"line {line}: {text}", line)

    def _fields(self, word: Word) -> list[str]:
        return self._expander.fields(word)

    def _simple(self, own: Simple) -> bool:
        words = list(own.words)
        while words and _ASSIGNED.match(words[0].source):
            if all(_ASSIGNED.match(word.source) for word in words):
                self._assign(words[0])
            else:
                self._exported.setdefault(words[0].source.partition("=")[0])
            words.pop(0)
        if not words:
            return False
        name = words[0].plain or ""
        if name in _DECLARES:
            self._declare(name, words[1:])
            return False
        return self._command([field for word in words for field in self._fields(word)], own.line)

    def _declare(self, name: str, words: Sequence[Word]) -> None:
        for word in words:
            if _ASSIGNED.match(word.source):
                self._assign(word)
            own = word.source.partition("=")[0].rstrip("+")
            if name == "export" and own.isidentifier():
                self._exported.setdefault(own)

    def _assign(self, word: Word) -> None:
        """Follow an assignment, unless the command line gives the variable."""
        found = _ASSIGNED.match(word.source)
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

    def _assigned_text(self, word: Word, name: str) -> str:
        """Return the text behind = of an assignment."""
        text = self._expander.text(word, own=name)
        head, equals, value = text.partition("=")
        assert equals, "an assignment has ="
        if value.startswith("~/") and not any(p.quoted for p in word.pieces):
            value = self._expander.holes.mark(Hole("$HOME", "HOME", 0)) + value[1:]
        return value if not head.count("[") or "]" in head else text.partition("]=")[2]

    def _command(self, words: list[str], line: int) -> bool:
        """Read a command whose words are known; return whether it ends the script."""
        if not words or not words[0]:
            return False
        name = words[0]
        if name in _ENDS:
            return True
        own: dict[str, Callable[[list[str], int], None]] = {
            "eval": self._eval,
            "source": self._source,
            ".": self._source,
            "set": self._set,
            "shift": self._shift,
            "unset": self._unset,
            "read": self._read_input,
            "mapfile": self._read_input,
            "readarray": self._read_input,
        }
        if name in own:
            own[name](words[1:], line)
        elif name in self._functions:
            return self._call(name, words[1:], line)
        elif name.startswith("--") and len(words) <= 40:
            shown = self._expander.holes.shown(name)
            self._note(
                line,
                f"{shown} begins a command, because the line before it does not end in a backslash "
                "(a blank or a comment behind the backslash ends a command too): its flags are "
                "not read",
            )
        elif name not in ("echo", "printf", "cat", ":", "cd", "mkdir", "exec") or len(words) > 2:
            self._program(words, line)
        return name == "exec" and len(words) > 1

    def _program(self, words: list[str], line: int) -> None:
        if words[0] in ("echo", "printf", "cat", "mkdir"):
            return
        text = _text_for_shell(words)
        if text is not None:
            self._nested(words, text, line)
            return
        launch = launch_of(
            [*self._wrapper, *words], line + self._offset, self._expander.holes, self._directives
        )
        if launch is not None:
            self._launches[launch] = self._launches.get(launch, 0) + 1
        else:
            shown = (self._expander.holes.shown(word) for word in words)
            self._others.update(dict.fromkeys(w for w in shown if w.endswith((".sh", ".bash"))))

    def _nested(self, words: list[str], text: str, line: int) -> None:
        """Read the text of ``bash -c TEXT``."""
        before, offset = self._wrapper, self._offset
        self._wrapper = (*before, *(word for word in words if word != text))
        self._offset = offset + line - 1
        try:
            self._text_of(text, line)
        finally:
            self._wrapper, self._offset = before, offset

    def _text_of(self, text: str, line: int) -> None:
        with self._deeper(line):
            try:
                self.read(text)
            except ScriptError as error:
                raise ScriptError(line, f"in the text of this command, {error}") from error

    def _eval(self, words: list[str], line: int) -> None:
        before, self._offset = self._offset, self._offset + line - 1
        try:
            self._text_of(" ".join(words), line)
        finally:
            self._offset = before

    def _source(self, words: list[str], line: int) -> None:
        name = self._expander.holes.shown(words[0]) if words else ""
        self._note(line, f"source {name}: not read; its variables are given by --set NAME=VALUE")
        self._others.setdefault(name)

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
        for name in words:
            if name.isidentifier() and not is_ambient(name) and name not in self._given:
                self._scope.values[name] = self._expander.holes.mark(Hole(f"${name}", name, line))

    def _call(self, name: str, words: list[str], line: int) -> bool:
        """Read the body of a function with its arguments; a return ends only the function."""
        before = self._scope.places, self._scope.has_places
        self._scope.places, self._scope.has_places = tuple(words), True
        with self._deeper(line):
            self._block(self._functions[name])
        self._scope.places, self._scope.has_places = before
        return False


def _text_for_shell(words: Sequence[str]) -> str | None:
    """Return the text of ``bash -c TEXT``, also behind a launcher; ``None``: there is none."""
    for place, word in enumerate(words[:-1]):
        is_shell = word.rpartition("/")[2] in SHELLS
        for ahead in range(place + 1, len(words) - 1) if is_shell else ():
            if not words[ahead].startswith("-"):
                break
            if words[ahead].endswith("c") and not words[ahead].startswith("--"):
                return words[ahead + 1]
    return None
