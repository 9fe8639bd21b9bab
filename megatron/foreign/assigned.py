"""Finds the variables to which commands assign values, whether or not a run would reach them."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

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
from megatron.foreign.sums import assigned_by
from megatron.foreign.tokens import Word

ASSIGNED: Final = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=", re.DOTALL | re.ASCII)
"""The beginning of an assignment: the name, the subscript, and the + of +=."""

DECLARES: Final = frozenset({"export", "declare", "typeset", "local", "readonly"})
PREFIXES: Final = frozenset({"!", "time", "builtin", "command"})
"""Words before a command that change no assignment of the command."""

_ANYWHERE: Final = re.compile(
    r"(?<![\w$-])([A-Za-z_]\w*)(?:\[[^\]\n]{0,99}\])?(?:[-+*/%:]?=(?!=)|\+\+|--)", re.ASCII
)
_BEHIND: Final = re.compile(
    r"\b(?:for|read|mapfile|readarray|getopts|unset|printf|let)\b([^\n;|&]{0,999})", re.ASCII
)
"""Assignments and commands that assign, in a text that may be no script."""


PLACES: Final = "@"
"""Stands among the names for $1, $2 and so on."""

_LATER: Final = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]{0,99}\])?\+?=", re.ASCII)
_BY_DEFAULT: Final = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?:?=", re.ASCII)
_INPUTS: Final = frozenset({"read", "mapfile", "readarray", "getopts", "unset"})
_LEAVES: Final = frozenset({"break", "continue"})

Look = Callable[[int], None]
Found = Iterator[tuple[str, bool]]


def assigned_in(block: Block, functions: Mapping[str, Block], look: Look) -> dict[str, bool]:
    """Return the variables that statements may assign, each with whether they only append to it.

    Args:
        block: the statements.
        functions: the bodies of the script's functions, which the statements may call.
        look: gets the line of every statement, and may raise.
    """
    found: dict[str, bool] = {}
    called: set[str] = set()
    left = [*block]
    while left:
        statement = left.pop()
        look(statement.line)
        left += inner_of(statement)
        if isinstance(statement, Loop) and statement.name.isidentifier():
            found[statement.name] = False
        if isinstance(statement, Simple):
            for name, appends in _of_command(statement.words):
                found[name] = appends and found.get(name, True)
            names = {word.plain or "" for word in statement.words} & functions.keys()
            for name in sorted(names - called):
                called.add(name)
                left += functions[name]
    return found


def named_in(text: str) -> dict[str, bool]:
    """Return the variables that a text may assign which is no script, as ``assigned_in``."""
    names = [found[1] for found in _ANYWHERE.finditer(text)]
    names += [one for own in _BEHIND.finditer(text) for one in own[1].split()]
    return dict.fromkeys((name for name in names if name.isidentifier()), False)


def leaves_a_loop(block: Block, look: Look) -> bool:
    """Return whether statements may leave a loop or a round of it early."""
    return any(_has_word(own, _LEAVES) for own in commands_in(block, look))


def leaves_a_function(block: Block, look: Look) -> bool:
    """Return whether statements may leave a function early."""
    return any(_has_word(own, frozenset({"return"})) for own in commands_in(block, look))


def _has_word(own: Simple, names: frozenset[str]) -> bool:
    words = [word.source for word in own.words]
    is_read = "eval" in words and any(name in word for name in names for word in words)
    return is_read or not names.isdisjoint(words)


def commands_in(block: Block, look: Look) -> Iterator[Simple]:
    """Yield the commands within statements."""
    left = [*block]
    while left:
        statement = left.pop()
        look(statement.line)
        left += inner_of(statement)
        if isinstance(statement, Simple):
            yield statement


def inner_of(statement: Statement) -> list[Statement]:
    """Return the statements within a statement."""
    match statement:
        case Chain(links=links):
            return [own for _, own in links]
        case Branches(branches=branches, otherwise=otherwise):
            return [*(own for pair in branches for part in pair for own in part), *otherwise]
        case Case(choices=choices):
            return [own for _, body in choices for own in body]
        case Loop(body=body) | Group(body=body) | Function(body=body):
            return [*body]
    return []


def _of_command(words: tuple[Word, ...]) -> Found:
    """Yield the names to which a command assigns, each with whether it appends."""
    for word in words:
        yield from _of_word(word)
    own = [*words]
    while own and own[0].plain in PREFIXES:
        own.pop(0)
    begin = [word for word in own if ASSIGNED.match(word.source)]
    name = own[0].plain if own else ""
    if name in DECLARES or (own and len(begin) == len(own)):
        yield from map(_of_assignment, begin)
        return
    while own and ASSIGNED.match(own[0].source):
        own.pop(0)
    name = own[0].plain if own else ""
    texts = [word.source.strip("\"'") for word in own[1:]]
    if name in ("shift", "set"):
        yield PLACES, False
    elif name in _INPUTS:
        yield from ((text, False) for text in texts if text.isidentifier())
        yield from (("REPLY", False), ("OPTARG", False), ("OPTIND", False))
    elif name == "printf" and texts and texts[0].startswith("-v"):
        yield texts[0][2:] or "".join(texts[1:2]), False
    elif name == "let":
        yield from ((own, False) for text in texts for own in assigned_by(text))
    elif name == "eval":
        yield from ((own, False) for text in texts for own in _LATER.findall(text))
        yield from ((own, False) for text in texts for own in assigned_by(text))


def _of_word(word: Word) -> Found:
    """Yield the names that the replacement of a word's variables and sums assigns."""
    for piece in word.pieces:
        if piece.kind == "sum":
            yield from ((name, False) for name in assigned_by(piece.text))
        elif piece.kind == "variable" and (found := _BY_DEFAULT.match(piece.text)):
            yield found[1], False
    for element in word.elements or ():
        yield from _of_word(element)


def _of_assignment(word: Word) -> tuple[str, bool]:
    """Return the name of an assignment, and whether the value begins with the old one."""
    found = ASSIGNED.match(word.source)
    assert found is not None, "the caller has looked"
    name, inner = found[1], word.elements
    behind = word.source[found.end() :] if inner is None else inner[0].source if inner else ""
    olds = (f"${name}", f"${{{name}}}", f"${{{name}[@]}}", f"${{{name}[*]}}")
    first = re.match(r"\"?(\$\w+|\$\{[^}]*\})", behind)
    return name, found[2] is None and (bool(found[3]) or (first is not None and first[1] in olds))
