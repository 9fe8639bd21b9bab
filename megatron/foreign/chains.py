"""Parts of a script's statements: pipelines, tests, and statements in short for notes."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from megatron.foreign.conditions import is_test
from megatron.foreign.statements import Block, Chain, Group, Simple, Statement
from megatron.foreign.values import HOLE

CONSTANTS: Final = ("true", "false", ":")
"""Commands whose result is known."""

_LONGEST_SHOWN: Final = 70
"""Characters of a command that a note shows."""


def is_open(word: str) -> bool:
    """Return whether only a run tells a word of a loop: a hole, or names of files."""
    return HOLE.search(word) is not None or not set(word).isdisjoint("*?[")


def pipelines(links: Sequence[tuple[str, Statement]]) -> Iterator[tuple[str, Block]]:
    """Yield the pipelines of a chain, each with && or || before it, if any."""
    joint, parts = "", list[Statement]()
    for own, statement in links:
        if parts and own != "|":
            yield joint, tuple(parts)
            parts = []
        joint = joint if own == "|" else own
        parts.append(statement)
    yield joint, tuple(parts)


def piped(parts: Block) -> Statement:
    """Return the parts of a pipeline, each in a shell of its own."""
    line = parts[0].line
    return Group(tuple(Group((part,), part.line, is_apart=True) for part in parts), line)


def is_condition(statement: Statement) -> bool:
    """Return whether a statement is a test, true or false."""
    if not isinstance(statement, Simple):
        return False
    is_constant = len(statement.words) == 1 and statement.words[0].plain in CONSTANTS
    return is_constant or is_test(statement.words)


def names_it(name: str, text: str) -> bool:
    """Return whether a script has a variable, or a command as it is written."""
    if name.isidentifier() or name.isdigit():
        return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None
    return name in " ".join(text.split())


def shown(block: Block) -> str:
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
