"""Reads the commands of a script: trainings are collected, and files and functions are read."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from megatron.flags.readable import as_error
from megatron.foreign.assigned import (
    ASSIGNED,
    DECLARES,
    PREFIXES,
    named_in,
)
from megatron.foreign.faults import DEEPEST, MOST_SOURCED, ScriptError, SourcedError
from megatron.foreign.launches import (
    SHELLS,
    Launch,
    directives_of,
    launch_of,
    variables_of,
)
from megatron.foreign.sourced import SHELL_ENDS, CycleError, Sources
from megatron.foreign.statements import Block, Simple
from megatron.foreign.syntax import statements_of
from megatron.foreign.tokens import Word
from megatron.foreign.values import HOLE, Array
from megatron.foreign.variables import Variables

_ENDS: Final = frozenset({"exit", "return"})


class Commands(Variables, ABC):
    """Reads commands one after the other; a subclass goes through the statements around them."""

    def __init__(self, text: str, given: dict[str, str], sources: Sources) -> None:
        directives = directives_of(text)
        told = {name: value for name, value in given.items() if name.isidentifier()}
        places = {name: value for name, value in given.items() if re.fullmatch(r"[1-9]\d?", name)}
        own: dict[str, str | Array] = {**variables_of(directives), **told, **places}
        super().__init__(own, given, sources)
        self._directives, self._text = directives, text
        self._sourced_files = 0
        self._launches: dict[Launch, int] = {}
        self._others: dict[str, None] = {}
        self._wrapper: tuple[str, ...] = ()
        self._depth, self._returns = 0, 0

    @abstractmethod
    def read(self, text: str) -> None:
        """Read a text as commands."""

    @abstractmethod
    def _block(self, block: Block) -> bool:
        """Read statements; return whether the script ends in them."""

    @contextmanager
    def _deeper(self, line: int) -> Iterator[None]:
        if self._depth >= DEEPEST:
            raise ScriptError(line, f"more than {DEEPEST} levels of calls: is one without end?")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _fields(self, word: Word) -> list[str]:
        return self._expander.fields(word)

    def _simple(self, own: Simple) -> bool:
        words = list(own.words)
        while words and words[0].plain in PREFIXES:
            words.pop(0)
        while words and ASSIGNED.match(words[0].source):
            if all(ASSIGNED.match(word.source) for word in words):
                self._assign(words[0])
            else:
                self._exported.setdefault(words[0].source.partition("=")[0])
            words.pop(0)
        if not words:
            return False
        name = words[0].plain or ""
        if name in DECLARES:
            self._declare(name, words[1:])
            return False
        if words[0].source.startswith("(("):
            self._expander.computed(words[0].pieces[-1].text, own.line)
            return False
        return self._command([field for word in words for field in self._fields(word)], own.line)

    def _command(self, words: list[str], line: int) -> bool:
        """Read a command whose words are known; return whether it ends the script."""
        if not words or not words[0]:
            return False
        name = words[0]
        if name in _ENDS:
            self._returns += name == "return"
            return True
        own: dict[str, Callable[[list[str], int], None]] = {
            "eval": self._eval,
            "set": self._set,
            "shift": self._shift,
            "unset": self._unset,
            "read": self._read_input,
            "mapfile": self._read_input,
            "readarray": self._read_input,
            "getopts": self._read_input,
            "printf": self._printf,
            "let": self._let,
        }
        if name in own:
            own[name](words[1:], line)
        elif name in ("source", "."):
            return self._source(words[1:], line)
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
            [*self._wrapper, *words],
            self._from or line + self._offset,
            self._expander.holes,
            self._directives,
        )
        if launch is not None:
            self._launches[launch] = self._launches.get(launch, 0) + 1
        else:
            shown = (self._expander.holes.shown(word) for word in words)
            self._others.update(dict.fromkeys(w for w in shown if w.endswith((".sh", ".bash"))))

    def _nested(self, words: list[str], text: str, line: int) -> None:
        """Read the text of ``bash -c TEXT``, whose assignments end with that shell."""
        before, offset, scope = self._wrapper, self._offset, self._scope
        self._expander.scope = scope.copy()
        self._wrapper = (*before, *(word for word in words if word != text))
        self._offset = offset + line - 1
        try:
            self._text_of(text, line)
        finally:
            self._wrapper, self._offset, self._expander.scope = before, offset, scope

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

    def _source(self, words: list[str], line: int) -> bool:
        """Read the statements of another file; return whether they end the script."""
        name, holes = words[0] if words else "", self._expander.holes
        found = self._sources.find(name, holes)
        why = "" if HOLE.search(name) else self._sources.places(name)
        fault = f"there is no such file in {why}" if why else ""
        if found is not None:
            try:
                text = self._sources.text(found)
            except CycleError as error:
                raise ScriptError(line + self._offset, str(error)) from error
            except (OSError, ValueError) as error:
                fault = as_error(error)
            else:
                return self._sourced(found, text, words, line)
        told = f"not read{f' ({fault})' if fault else ''}; its variables are given by --set"
        self._note(line, f"source {holes.shown(name)}: {told} NAME=VALUE")
        self._others.setdefault(holes.shown(name))
        return False

    def _sourced(self, path: Path, text: str, words: list[str], line: int) -> bool:
        """Read the text of another file with its arguments; return whether it ends the script."""
        self._count_sourced(path, line)
        try:
            block = statements_of(text)
        except ScriptError as error:
            return self._unread(path, text, str(error), line)
        self._note(line, f"source {path}: read")
        line += self._offset
        scope, before = self._scope, (self._offset, self._from)
        places = scope.places, scope.has_places
        if len(words) > 1:
            scope.places, scope.has_places = tuple(words[1:]), True
        self._offset, self._from = 0, self._from or line
        self._text += f"\n{text}"
        self._sources.enter(path)
        try:
            with self._deeper(line):
                self._expander.budget.keep(line, f"the text of {path}", len(text))
                ended = self._whole(block, line)
        except SourcedError as error:
            is_inner = before[1] != 0
            fault = error.innermost if is_inner else f"in {path}, {error}"
            raise SourcedError(line, fault) from error
        except ScriptError as error:
            raise SourcedError(line, f"in {path}, {error}") from error
        finally:
            self._sources.leave()
            self._offset, self._from = before
        if len(words) > 1:
            self._scope.places, self._scope.has_places = places
        return ended

    def _count_sourced(self, path: Path, line: int) -> None:
        self._sourced_files += 1
        if self._sourced_files > MOST_SOURCED:
            raise ScriptError(
                line + self._offset,
                f"source {path}: files are read more than {MOST_SOURCED} times: give a shorter "
                "script, or the files' variables by --set NAME=VALUE without them",
            )

    def _unread(self, path: Path, text: str, fault: str, line: int) -> bool:
        """Tell a file that cannot be understood, and make unknown what it may assign."""
        self._note(line, f"source {path}: not read ({fault})")
        self._text += f"\n{text}"
        self._forget_all(named_in(text), line, f"source {path}")
        self._others.setdefault(str(path))
        return False

    def _whole(self, block: Block, line: int) -> bool:
        """Read all statements of a file; a return ends the file, and an exit the script."""
        returns = self._returns
        ended = self._block(block)
        returned = self._returns - returns
        if returned > ended:
            self._forget_all(self._assigned_in(block), line, "a file that returns early or not")
        self._returns = returns
        return ended and not returned

    def _is_there(self, name: str) -> bool:
        """Return whether a name is that of a file for a shell that can be read."""
        is_shell = name.endswith(SHELL_ENDS)
        return is_shell and self._sources.find(name, self._expander.holes) is not None

    def _call(self, name: str, words: list[str], line: int) -> bool:
        """Read the body of a function with its arguments; a return ends only the function.

        After a return in a branch, a reader cannot know which of the assignments were made.
        """
        before = self._scope.places, self._scope.has_places
        returns = self._returns
        self._scope.places, self._scope.has_places = tuple(words), True
        self._locals.append({})
        with self._deeper(line):
            ended = self._block(self._functions[name])
        own = self._locals.pop()
        if self._returns - returns > ended:
            names = self._assigned_in(self._functions[name])
            names = {one: more for one, more in names.items() if one not in own}
            self._forget_all(names, line, f"{name} returns early or not")
        self._returns = returns
        for one, value in own.items():
            if value is None:
                self._scope.values.pop(one, None)
            else:
                self._scope.values[one] = value
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
