"""Writes the line that starts a script's training here, one flag a line, ready to paste.

Nothing of the script is written as a command. What is not known becomes a variable of the shell
that the user fills; the shell refuses by name one that is left empty.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from megatron.foreign.judge import Judgement, Variant
from megatron.foreign.launches import Ranks
from megatron.foreign.values import Hole, Holes, is_ambient
from megatron.planning.launch_line import PROGRAM_BY_PYTHON, SRUN, blanks_of, torchrun_pieces

WIDTH: Final = 96
"""Columns of a line, without the blank and the backslash at its end."""

_INDENT: Final = "    "

_BY_TASKS: Final = ("srun", "mpirun", "mpiexec")
"""Launchers that start a process for every rank; here srun stands for all of them."""

_NEEDED: Final = ("DATA_PATH", "TOKENIZER")
"""Variables of ``planning.launch_line`` for flags that a run needs and a dry run does not."""


@dataclass
class _Blanks:
    """The variables that the user fills, each with its meaning."""

    holes: Holes
    meanings: dict[str, str] = field(default_factory=dict)
    _names: dict[Hole, str] = field(default_factory=dict)

    def name_of(self, hole: Hole) -> str:
        """Return the name of the variable that stands for a hole."""
        if hole not in self._names:
            free = hole.name and hole.name.isidentifier()
            name = hole.name if free else f"VALUE_{len(self._names) + 1}"
            self._names[hole] = name
            where = f" in line {hole.line}" if hole.line else ""
            choices = f"; one of {', '.join(hole.choices)}" if hole.choices else ""
            self.meanings.setdefault(name, f"{hole.text}{where}{choices}")
        return self._names[hole]

    def word(self, value: str) -> str:
        """Return a value as a shell reads it."""
        parts = self.holes.split(value)
        if all(isinstance(part, str) for part in parts):
            return shlex.quote(value) if value.isprintable() else _escaped(value)
        return '"' + "".join(self._part(part) for part in parts) + '"'

    def _part(self, part: str | Hole) -> str:
        if isinstance(part, str):
            if not part.isprintable():
                return f'"{_escaped(part)}"'  # between the quotes of the word's other parts
            return re.sub(r'([\\"$`])', r"\\\1", part)
        if is_ambient(part.name):
            return f"${{{part.name}}}"
        return self.asked(self.name_of(part))

    @staticmethod
    def asked(name: str) -> str:
        """Return a variable as the line has it."""
        return f"${{{name}:?fill it in above}}"


def _escaped(text: str) -> str:
    """Return a text with characters that cannot be printed, as bash reads it without them."""
    plain = text.replace("\\", "\\\\").replace("'", "\\'")
    written = "".join(c if c.isprintable() else _coded(ord(c)) for c in plain)
    return f"$'{written}'"


def _coded(code: int) -> str:
    """Return a character by its number, as bash reads it in $'...'."""
    return f"\\x{code:02x}" if code < 128 else f"\\U{code:08x}"


def launch_text(own: Judgement, variant: Variant, holes: Holes) -> str:
    """Return lines of a shell that start a training.

    Args:
        own: the training.
        variant: the line to write.
        holes: the holes of the script.
    """
    blanks, pieces = _Blanks(holes), list[str]()
    for flag in variant.flags:
        pieces.append(" ".join(map(blanks.word, flag.words(holes))))
    options = {flag.option for flag in variant.flags}
    for blank in blanks_of(options):
        if blank.name in _NEEDED:
            blanks.meanings[blank.name] = blank.meaning
            pieces += blank.filled
    start = _start(own.launch.launcher, own.ranks, blanks)
    command = [*_wrapped(start), *(f"{_INDENT}{piece}" for piece in pieces)]
    return "\n".join([*_head(variant, blanks), " \\\n".join(command)])


def script_text(own: Judgement, variant: Variant, holes: Holes, origin: str) -> str:
    """Return the same lines as a script; ``origin`` is the file from which they come."""
    head = f"#!/usr/bin/env bash\n# By from-megatron, from {_plain(origin)}.\nset -euo pipefail\n"
    return f"{head}\n{launch_text(own, variant, holes)}\n"


def _start(launcher: str, ranks: Ranks, blanks: _Blanks) -> list[str]:
    """Return the words of the launcher."""
    machines = _number(ranks.machines, "NNODES", "number of machines", blanks)
    each = _number(ranks.per_machine, "GPUS_PER_NODE", "GPUs of a machine", blanks)
    if launcher in _BY_TASKS:
        nodes = [f"--nodes={machines}", f"--ntasks-per-node={each}", f"--gpus-per-node={each}"]
        return [SRUN[0].removeprefix("exec "), *nodes, *SRUN[1:], PROGRAM_BY_PYTHON]
    if machines != "1":
        blanks.meanings["MASTER_ADDR"] = "name or address of the first machine"
    return torchrun_pieces(machines, each)


def _number(known: int | None, name: str, meaning: str, blanks: _Blanks) -> str:
    if known is not None:
        return str(known)
    blanks.meanings.setdefault(name, meaning)
    return f'"{blanks.asked(name)}"'


def _head(variant: Variant, blanks: _Blanks) -> Iterator[str]:
    """Yield the comments and the variables before the line."""
    for change in variant.changes:
        yield f"# Change first: {_plain(change)}"
    if blanks.meanings:
        yield "# Fill these in:"
    for name, meaning in blanks.meanings.items():
        yield f"{f'{name}=':<13} # {_plain(meaning)}"
    if "MASTER_ADDR" in blanks.meanings:
        yield "# NODE_RANK: the number of the machine, from 0, set on every machine"


def _plain(text: str) -> str:
    """Return a text that fits a comment of one line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _wrapped(pieces: Sequence[str]) -> list[str]:
    """Return the pieces of a command in lines."""
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + 1 + len(piece) > WIDTH:
            lines.append(_INDENT + piece)
        else:
            lines[-1] += f" {piece}"
    return lines
