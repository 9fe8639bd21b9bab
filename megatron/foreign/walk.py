"""Goes through a shell script as a careful reader does, and collects the trainings that it starts.

Nothing is run. Assignments are followed. A branch whose condition is known is taken or left out;
otherwise all branches are read, and what they change differently is a hole. Each such decision is
a note.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from megatron.foreign.assigned import (
    ASSIGNED,
    PLACES,
    leaves_a_function,
    leaves_a_loop,
)
from megatron.foreign.chains import (
    CONSTANTS,
    is_condition,
    is_open,
    names_it,
    piped,
    pipelines,
    shown,
)
from megatron.foreign.conditions import is_test, judged
from megatron.foreign.faults import ScriptError
from megatron.foreign.launches import (
    Launch,
)
from megatron.foreign.merge import Merging
from megatron.foreign.patterns import matches
from megatron.foreign.simple import Commands
from megatron.foreign.sourced import Sources
from megatron.foreign.statements import (
    Block,
    Branches,
    Case,
    Chain,
    Function,
    Group,
    Loop,
    Simple,
    Statement,
)
from megatron.foreign.syntax import statements_of
from megatron.foreign.tokens import Word
from megatron.foreign.values import (
    HOLE,
    Holes,
    Scope,
)

_SURE: Final = frozenset({"echo", "printf", ":", "set", "export", "shopt"})
"""Commands that are done well."""

_MOST_ROUNDS: Final = 64
"""Rounds of a loop that are read."""


@dataclass(frozen=True)
class Script:
    """The findings of a reader in a script.

    Attributes:
        launches: the trainings that the script starts, each once.
        holes: all holes.
        notes: lines for the user, in the order of the script.
        assumed: variables that tests read as not set.
        defaults: values that the script gives variables that are not set, without those that were
            given.
        exported: names of the variables that the script hands to programs.
        others: other scripts that the script starts or reads.
    """

    launches: tuple[Launch, ...]
    holes: Holes
    notes: tuple[str, ...]
    assumed: tuple[str, ...]
    defaults: Mapping[str, str]
    exported: tuple[str, ...]
    others: tuple[str, ...]


def read_script(
    text: str, given: Mapping[str, str] | None = None, path: Path | None = None
) -> Script:
    """Read a script.

    Args:
        text: the script.
        given: values of its variables, of $1 and so on, and of commands as it writes them.
        path: of the script, from whose folder the files are looked for that it sources; ``None``:
            no such file is read.

    Raises:
        ScriptError: quotes or reserved words do not match, or a limit is exceeded.
    """
    reader = _Reader(text, dict(given or {}), Sources(path))
    try:
        reader.read(text)
    except RecursionError:
        raise ScriptError(1, "blocks or calls are nested too deeply: flatten them") from None
    return reader.script()


class _Reader(Commands):
    """Reads the statements of a script in their order."""

    def script(self) -> Script:
        """Return all that was found."""
        own, told = self._expander, set(self._given)
        launches = [replace(launch, times=times) for launch, times in self._launches.items()]
        assumed = [name for name in own.assumed if name not in told]
        notes = sorted(self._notes, key=lambda note: self._notes[note])
        for name in self._given:
            if name not in own.used and not names_it(name, self._text):
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

    @contextmanager
    def _within(self, scope: Scope) -> Iterator[None]:
        """Let the block change another scope."""
        before, self._expander.scope = self._expander.scope, scope
        try:
            yield
        finally:
            self._expander.scope = before

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
                return (
                    self._apart(statement.body)
                    if statement.is_apart
                    else self._block(statement.body)
                )
            case Function():
                self._functions[statement.name] = statement.body
        return False

    def _apart(self, block: Block) -> bool:
        """Read statements that a shell of their own runs: their assignments end with that shell."""
        with self._within(self._scope.copy()):
            self._block(block)
        return False

    def _forget(self, block: Block, line: int, by: str) -> None:
        """Make all variables unknown that statements may assign."""
        self._forget_all(self._assigned_in(block), line, by)

    def _holds(self, condition: Block) -> bool | None:
        """Return whether a condition holds; ``None``: it is not known. Its commands are read."""
        if len(condition) == 1:
            match condition[0]:
                case Simple(words=words) if is_test(words):
                    return judged(words, self._expander, self._is_there)
                case Simple(words=(Word() as only,)) if only.plain in CONSTANTS:
                    return only.plain != "false"
                case Chain(links=links) if all(joint in ("", "&&", "||") for joint, _ in links):
                    return self._chained(links)
        self._block(condition)
        return None

    def _chained(self, links: Sequence[tuple[str, Statement]]) -> bool | None:
        found: bool | None = None
        for joint, statement in links:
            if joint and found is (joint == "||"):
                continue
            own = self._holds((statement,))
            if joint and found is None:
                self._forget((statement,), statement.line, f"what stands behind {joint}")
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
            told = shown(condition)
            holds = self._holds(condition)
            if bodies:
                self._forget(condition, own.line, "a condition that may not be reached")
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
        if any(own.places != scopes[0].places for own in scopes):
            self._forget_all({PLACES: False}, line, told)
        for names, what in (
            (merging.joined, "the only branch that has flags counts for"),
            (merging.first, "the first branch that has flags counts for"),
            (merging.unsure, "give by --set what the branch decides:"),
        ):
            if names:
                told += f"; {what} {', '.join(names)}"
        if len(scopes) > 1:
            self._note(line, told)

    def _case(self, own: Case) -> bool:
        word = self._expander.text(own.word)
        told = f"case {own.word.source}"
        if HOLE.search(word) or own.falls:
            bodies = [
                ("|".join(p.source for p in patterns), body) for patterns, body in own.choices
            ]
            names = ", ".join(name for name, _ in bodies)
            self._all_of(own.line, f"{told} (of {names})", bodies)
            if own.falls:
                every = tuple(one for _, body in bodies for one in body)
                self._forget(every, own.line, f"{told}, whose branches go on with the next")
            return False
        for patterns, body in own.choices:
            for pattern in patterns:
                if matches(word, self._expander.text(pattern)):
                    self._note(own.line, f"{told}: {pattern.source} is read")
                    return self._taken(own.line, told, body)
        self._note(own.line, f"{told}: no pattern fits {word!r}")
        return False

    def _loop(self, own: Loop) -> bool:
        """Read a loop over known words in rounds, any other one once.

        What another loop assigns is not known, within it and behind it.
        """
        words = None if own.words is None else [f for w in own.words for f in self._fields(w)]
        is_known = own.name.isidentifier() and not leaves_a_loop(
            own.body, self._expander.budget.look
        )
        if words is None or not is_known or any(map(is_open, words)):
            return self._once(own)
        for word in words[:_MOST_ROUNDS]:
            self._expander.put(own.name, word)
            if self._block(own.body):
                return True
        if len(words) > _MOST_ROUNDS:
            self._note(own.line, f"for: the first {_MOST_ROUNDS} of {len(words)} rounds are read")
            self._forget((own,), own.line, "a loop of many rounds")
        return False

    def _once(self, own: Loop) -> bool:
        """Read a loop of which a reader cannot know the rounds."""
        names = self._assigned_in((own,))
        self._forget_all(names, own.line, "a loop")
        launches, before, scope = len(self._launches), self._scope.values, self._scope.copy()
        with self._within(scope):
            self._block(own.body)
        more = [name for name in scope.values.keys() | before.keys() if name not in names]
        changed = [name for name in more if before.get(name) != scope.values.get(name)]
        self._expander.forget(sorted(changed), own.line, "a loop")
        if len(self._launches) > launches or own.name:
            self._note(own.line, "a loop: read once")
        return False

    def _chain(self, own: Chain) -> bool:
        """Read && and ||: commands behind a test are a branch.

        A command counts as done well, but what is assigned behind it is not known.
        """
        found: bool | None = True
        is_sure, returns = True, self._returns
        for joint, parts in pipelines(own.links):
            if joint and not is_sure and self._matters(parts):
                found = None
            if joint and found is (joint == "||"):
                continue
            one = parts[0] if len(parts) == 1 else None
            if one is not None and is_condition(one):
                found, is_sure = self._behind(joint, found, one), is_sure or not joint
            elif found is None and joint:
                self._maybe(one or piped(parts), shown((own,)))
            elif one is None:
                self._statement(piped(parts))
                found, is_sure = True, False
            elif self._statement(one):
                # Behind a test, exit is for another use of the script than this one.
                return joint == "" or (is_sure and self._returns > returns)
            else:
                found, is_sure = self._done_well(one)
            if one is None and "lastpipe" in self._text:
                self._forget(parts[-1:], own.line, "a pipeline with lastpipe")
        return False

    def _matters(self, block: Block) -> bool:
        """Return whether later statements depend on whether these statements are run."""
        look = self._expander.budget.look
        return bool(self._assigned_in(block)) or leaves_a_function(block, look)

    def _behind(self, joint: str, found: bool | None, test: Statement) -> bool | None:
        """Return whether a test holds together with the tests before it."""
        own = self._holds((test,))
        if joint and found is None and own is (joint == "&&"):
            return None
        return own

    def _done_well(self, statement: Statement) -> tuple[bool | None, bool]:
        """Return whether a statement counts as done well, and whether this is sure."""
        if not isinstance(statement, Simple):
            return True, False
        names = [word.plain or "" for word in statement.words]
        if set(names) & self._functions.keys():
            return None, False
        begins_well = bool(names) and names[0] in _SURE
        is_plain = all(piece.kind != "command" for w in statement.words for piece in w.pieces)
        are_values = is_plain and all(ASSIGNED.match(word.source) for word in statement.words)
        return True, begins_well or are_values

    def _maybe(self, statement: Statement, told: str) -> None:
        """Read a statement of which it is not known whether it is run."""
        scope, launches = self._scope.copy(), len(self._launches)
        with self._within(scope):
            ended = self._statement(statement)
        before = self._scope.copy()
        if not ended and (scope != before or len(self._launches) > launches):
            self._join(statement.line, f"{told} is not known: it is read", [scope, before])
