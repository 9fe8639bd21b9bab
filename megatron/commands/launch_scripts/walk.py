"""Goes through a shell script as a careful reader does, and collects the trainings that it starts.

Nothing is run. Assignments are followed. A branch whose condition is known is taken or left out;
otherwise all branches are read, and what they change differently is a hole. Each such decision is
a note.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from megatron.commands.launch_scripts.conditions import is_test, judged
from megatron.commands.launch_scripts.expand import Expander
from megatron.commands.launch_scripts.faults import DEEPEST, ScriptError
from megatron.commands.launch_scripts.launches import (
    SHELLS,
    Launch,
    directives_of,
    launch_of,
    variables_of,
)
from megatron.commands.launch_scripts.merge import Merging
from megatron.commands.launch_scripts.patterns import matches
from megatron.commands.launch_scripts.syntax import (
    Block,
    Branches,
    Case,
    Chain,
    Function,
    Group,
    Loop,
    Simple,
    Statement,
    statements_of,
)
from megatron.commands.launch_scripts.values import (
    HOLE,
    Array,
    Hole,
    Holes,
    Scope,
    is_ambient,
)
from megatron.commands.launch_scripts.words import Word

_ASSIGNED: Final = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=", re.DOTALL)
_DECLARES: Final = frozenset({"export", "declare", "typeset", "local", "readonly"})
_ENDS: Final = frozenset({"exit", "return"})
_MOST_ROUNDS: Final = 64
"""Rounds of a loop that are read."""

_LONGEST_SHOWN: Final = 70
"""Characters of a command that a note shows."""


@dataclass(frozen=True)
class Script:
    """What a reader finds in a script.

    Attributes:
        launches: the trainings that it starts, each once.
        holes: all holes.
        notes: lines for the user, in the order of the script.
        assumed: variables that tests read as not set.
        defaults: values that the script gives variables that are not set, without those that were
            given.
        exported: names of the variables that it hands to programs.
        others: other scripts that it starts or reads.
    """

    launches: tuple[Launch, ...]
    holes: Holes
    notes: tuple[str, ...]
    assumed: tuple[str, ...]
    defaults: Mapping[str, str]
    exported: tuple[str, ...]
    others: tuple[str, ...]


def read_script(text: str, given: Mapping[str, str] | None = None) -> Script:
    """Read a script.

    Args:
        text: the script.
        given: values of its variables, of $1 and so on, and of commands as it writes them.

    Raises:
        ScriptError: quotes or reserved words do not match, or a limit is exceeded.
    """
    reader = _Reader(text, dict(given or {}))
    try:
        reader.read(text)
    except RecursionError:
        raise ScriptError(1, "blocks or calls are nested too deeply: flatten them") from None
    return reader.script()


class _Reader:
    """Reads the statements of a script in their order."""

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

    def script(self) -> Script:
        """Return all that was found."""
        own, told = self._expander, set(self._given)
        launches = [replace(launch, times=times) for launch, times in self._launches.items()]
        assumed = [name for name in own.assumed if name not in told]
        notes = sorted(self._notes, key=lambda note: self._notes[note])
        for name in self._given:
            if name not in own.used and not _names(name, self._text):
                notes.append(f"--set {name}: the script has no {name}")
        defaults = {
            name: own.holes.shown(value) for name, value in own.defaults.items() if name not in told
        }
        return Script(
            tuple(launches),
            own.holes,
            tuple(notes),
            tuple(assumed),
            defaults,
            tuple(self._exported),
            tuple(self._others),
        )

    def read(self, text: str) -> None:
        """Read a text as commands."""
        self._block(statements_of(text))

    @property
    def _scope(self) -> Scope:
        return self._expander.scope

    @contextmanager
    def _within(self, scope: Scope) -> Iterator[None]:
        """Let the block change another scope."""
        before, self._expander.scope = self._expander.scope, scope
        try:
            yield
        finally:
            self._expander.scope = before

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

    def _block(self, block: Block) -> bool:
        """Read statements; return whether the script ends in them."""
        return any(self._statement(statement) for statement in block)

    def _statement(self, statement: Statement) -> bool:
        self._expander.budget.step(statement.line)
        match statement:
            case Simple():
                return self._simple(statement)
            case Chain():
                return self._chain(statement)
            case Branches():
                return self._branches(statement)
            case Case():
                return self._case(statement)
            case Loop():
                return self._loop(statement)
            case Group():
                return self._block(statement.body)
            case Function():
                self._functions[statement.name] = statement.body
        return False

    # Branches

    def _holds(self, condition: Block) -> bool | None:
        """Return whether a condition holds; ``None``: it is not known. Its commands are read."""
        if len(condition) == 1:
            match condition[0]:
                case Simple(words=words) if is_test(words):
                    return judged(words, self._expander)
                case Simple(words=(Word() as only,)) if only.plain in ("true", ":", "false"):
                    return only.plain != "false"
                case Chain(links=links) if all(joint in ("", "&&", "||") for joint, _ in links):
                    return self._chained(links)
        self._block(condition)
        return None

    def _chained(self, links: Sequence[tuple[str, Statement]]) -> bool | None:
        found: bool | None = None
        for joint, statement in links:
            own = self._holds((statement,))
            if joint == "&&":
                own = False if False in (found, own) else None if None in (found, own) else True
            elif joint == "||":
                own = True if found or own else None if None in (found, own) else False
            found = own
        return found

    def _branches(self, own: Branches) -> bool:
        """Read if: the branch that is taken, or all that may be."""
        bodies: list[tuple[str, Block]] = []
        for condition, body in own.branches:
            told = _shown(condition)
            holds = self._holds(condition)
            if holds is None:
                bodies.append((told, body))
                continue
            if holds and not bodies:
                self._note(own.line, f"if {told}: true, its branch is read")
                return self._taken(own.line, told, body)
            if holds:
                bodies.append((told, body))
                return self._all_of(own.line, f"if {bodies[0][0]}", bodies)
            self._note(own.line, f"if {told}: false, its branch is left out")
        if not bodies:
            return self._taken(own.line, "else", own.otherwise)
        return self._all_of(own.line, f"if {bodies[0][0]}", [*bodies, ("else", own.otherwise)])

    def _taken(self, line: int, told: str, body: Block) -> bool:
        """Read a branch that is known to be taken; one that ends the script is left."""
        scope = self._scope.copy()
        with self._within(scope):
            ended = self._block(body)
        if ended:
            self._note(line, f"{told}: the script would end here; the lines behind it are read")
        else:
            self._expander.scope = scope
        return False

    def _all_of(self, line: int, told: str, bodies: Sequence[tuple[str, Block]]) -> bool:
        """Read branches of which a reader cannot know which one is taken."""
        scopes = []
        for _, body in bodies:
            self._expander.budget.step(line)
            scope = self._scope.copy()
            with self._within(scope):
                if not self._block(body):
                    scopes.append(scope)
        self._join(line, f"{told} is not known: all branches are read", scopes)
        return False

    def _join(self, line: int, told: str, scopes: Sequence[Scope]) -> None:
        if not scopes:
            return
        merging = Merging(self._expander.holes, line)
        self._expander.scope = merging.merged(self._scope, scopes)
        for names, what in (
            (merging.joined, "have the flags of all of them"),
            (merging.first, "differ, and the first branch counts"),
            (merging.unsure, "depend on it: give them by --set"),
        ):
            if names:
                told += f"; {', '.join(names)} {what}"
        if len(scopes) > 1:
            self._note(line, told)

    def _case(self, own: Case) -> bool:
        word = self._expander.text(own.word)
        told = f"case {own.word.source}"
        if HOLE.search(word):
            bodies = [
                ("|".join(p.source for p in patterns), body) for patterns, body in own.choices
            ]
            names = ", ".join(name for name, _ in bodies)
            return self._all_of(own.line, f"{told} (of {names})", bodies)
        for patterns, body in own.choices:
            for pattern in patterns:
                if matches(word, self._expander.text(pattern)):
                    self._note(own.line, f"{told}: {pattern.source} is read")
                    return self._taken(own.line, told, body)
        self._note(own.line, f"{told}: no pattern fits {word!r}")
        return False

    def _loop(self, own: Loop) -> bool:
        """Read a loop over known words in rounds, any other one once, without its assignments."""
        words = None if own.words is None else [f for w in own.words for f in self._fields(w)]
        if own.name.isidentifier() and words is not None and not any(map(HOLE.search, words)):
            if len(words) > _MOST_ROUNDS:
                self._note(
                    own.line, f"for: the first {_MOST_ROUNDS} of {len(words)} rounds are read"
                )
            for word in words[:_MOST_ROUNDS]:
                self._scope.values[own.name] = word
                self._block(own.body)
            return False
        with self._within(self._scope.copy()):
            if own.name.isidentifier():
                hole = Hole(f"${own.name}", own.name, own.line)
                self._scope.values[own.name] = self._expander.holes.mark(hole)
            launches = len(self._launches)
            self._block(own.body)
        if len(self._launches) > launches or own.name:
            self._note(own.line, "a loop: read once")
        return False

    def _chain(self, own: Chain) -> bool:
        """Read && and ||: what stands behind a test, as a branch; a command counts as done well."""
        found: bool | None = True
        for joint, statement in own.links:
            if joint in ("&&", "||") and found is (joint == "||"):
                continue
            is_condition = isinstance(statement, Simple) and is_test(statement.words)
            if is_condition and joint != "|":
                found = self._holds((statement,))
            elif found is None and joint in ("&&", "||"):
                self._maybe(statement, _shown((own,)))
            elif self._statement(statement):
                return joint == ""
            else:
                found = True
        return False

    def _maybe(self, statement: Statement, told: str) -> None:
        """Read a statement of which it is not known whether it is run."""
        scope = self._scope.copy()
        with self._within(scope):
            ended = self._statement(statement)
        if not ended:
            before = self._scope.copy()
            self._join(statement.line, f"{told} is not known: it is read", [scope, before])

    # Commands

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
        elif isinstance(before, dict) and is_more:
            before["0"] = before.get("0", "") + text
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


def _names(name: str, text: str) -> bool:
    """Return whether a script has a variable, or a command as it is written."""
    if name.isidentifier() or name.isdigit():
        return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None
    return name in " ".join(text.split())


def _shown(block: Block) -> str:
    """Return commands in short, for a note."""
    text = "; ".join(_source(statement) for statement in block)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _source(statement: Statement) -> str:
    match statement:
        case Simple(words=words):
            return " ".join(
                word.pieces[-1].text.join(("((", "))"))
                if word.source.startswith("((")
                else word.source
                for word in words
            )
        case Chain(links=links):
            parts = (f"{joint} {_source(own)}".strip() for joint, own in links)
            return " ".join(parts)
    return "..."
