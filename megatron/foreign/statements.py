"""The statements of a shell script, as far as a reader of launch scripts needs them."""

from dataclasses import dataclass

from megatron.foreign.tokens import Word


@dataclass(frozen=True)
class Simple:
    """A command: assignments before it, its name and its arguments, all of them words."""

    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True)
class Chain:
    """Statements joined by ``&&``, ``||`` or ``|``, each with the operator before it."""

    links: "tuple[tuple[str, Statement], ...]"
    line: int


@dataclass(frozen=True)
class Branches:
    """``if``: conditions with their bodies, and the body if no condition holds."""

    branches: "tuple[tuple[Block, Block], ...]"
    otherwise: "Block"
    line: int


@dataclass(frozen=True)
class Case:
    """``case``: a word, and bodies with the patterns that they are for."""

    word: Word
    choices: "tuple[tuple[tuple[Word, ...], Block], ...]"
    line: int
    falls: bool = False
    """Whether a body may go on with another one (``;&`` or ``;;&``)."""


@dataclass(frozen=True)
class Loop:
    """``for NAME in WORDS``, or with an empty name ``while``, ``until`` and ``for ((...))``.

    The condition of a loop is the beginning of the body.
    """

    name: str
    words: tuple[Word, ...] | None
    body: "Block"
    line: int


@dataclass(frozen=True)
class Group:
    """``{ ...; }``, or in a shell of its own ``( ... )`` and what stands before ``&``."""

    body: "Block"
    line: int
    is_apart: bool = False


@dataclass(frozen=True)
class Function:
    """The definition of a function."""

    name: str
    body: "Block"
    line: int


Statement = Simple | Chain | Branches | Case | Loop | Group | Function
Block = tuple[Statement, ...]
