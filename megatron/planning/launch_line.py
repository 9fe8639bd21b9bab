"""The line that starts a job, ready to run: by torchrun on every machine, or by Slurm.

A shell variable stands for everything that the question does not tell, such as the data. The first
lines set these variables, and the user fills them. The shell refuses by name a variable that is
left empty (``${NAME:?...}``), before it starts anything.
"""

import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from megatron.flags.words import split
from megatron.planning.asked.question import LENGTHS, Question

WIDTH: Final = 98
"""Columns of a line, without the backslash at its end."""

PORT: Final = 29500
"""The port at which the ranks of several machines meet: torchrun's own."""

SAVE_INTERVAL: Final = 500
"""Iterations between checkpoints, if the question does not tell it."""

_INDENT: Final = "    "


class Blank(NamedTuple):
    """A shell variable that the user fills.

    Attributes:
        name: name of the variable.
        meaning: its meaning, for a comment.
        pieces: words of the command line, a flag and its value each, with ``@`` in place of the
            variable.
        unless: flags of the question of which each one makes the variable needless.
        value: its value, if it is known already.
    """

    name: str
    meaning: str
    pieces: tuple[str, ...]
    unless: frozenset[str] = frozenset()
    value: str = ""

    @property
    def line(self) -> str:
        """The line that sets the variable."""
        value = shlex.quote(self.value) if self.value else ""
        return f"{f'{self.name}={value}':<13} # {self.meaning}"

    @property
    def filled(self) -> list[str]:
        """The words of the command line as the shell reads them."""
        used = f'"${{{self.name}:?fill it in above}}"'
        return [piece.replace("@", used) for piece in self.pieces]


_OWN_DATA: Final = frozenset(
    {
        *("--data-path", "--train-data-path", "--data-args-path"),
        *("--per-split-data-args-path", "--mock-data"),
    }
)


def _blanks(question: Question) -> list[Blank]:
    """Return the variables that the job needs besides its flags."""
    return [*blanks_of(question.options, _tokenizer(question.model))]


def blanks_of(options: Collection[str], tokenizer: str = "") -> Iterator[Blank]:
    """Yield the variables that a job needs besides some flags.

    Args:
        options: the flags.
        tokenizer: folder of the tokenizer, if known.
    """
    known = (
        Blank(
            "DATA_PATH",
            "prefix of the .bin and .idx files that tools/preprocess_data.py writes",
            ("--data-path @",),
            _OWN_DATA,
        ),
        Blank(
            "TOKENIZER",
            "folder of the tokenizer, in Hugging Face's form",
            ("--tokenizer-type HuggingFaceTokenizer", "--tokenizer-model @"),
            frozenset({"--tokenizer-type", "--mock-data"}),
            tokenizer,
        ),
        Blank(
            "LR",
            "largest learning rate, such as 3e-4; warm-up and decay have flags of their own",
            ("--lr @",),
            frozenset({"--lr"}),
        ),
        Blank("TRAIN_ITERS", "iterations of the whole training", ("--train-iters @",), LENGTHS),
        Blank(
            "SAVE",
            "folder for checkpoints, from which the job goes on when it is started again",
            ("--save @", "--load @"),
            frozenset({"--save"}),
        ),
    )
    yield from (blank for blank in known if blank.unless.isdisjoint(options))


def _tokenizer(model: Path | None) -> str:
    """Return the folder of the model if it has a tokenizer too; otherwise nothing."""
    if model is not None and any((model / name).is_file() for name in _TOKENIZERS):
        return str(model)
    return ""


_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model")


def launch_line(question: Question, words: Sequence[str]) -> str:
    """Return lines of a shell that start the job, by torchrun or, if asked for, by Slurm.

    The first lines are those that the user fills: data, tokenizer, learning rate, the folder for
    checkpoints, and the length if the question does not tell it.

    Args:
        question: tells the GPUs, and the flags that do not depend on the layout.
        words: flags of the layout and the plan, which stand behind ``question.words``.
    """
    blanks = _blanks(question)
    paragraphs = [
        [piece for blank in blanks for piece in blank.filled],
        [*_pieces(question.words), *_of_checkpoints(question)],
        _pieces(words),
    ]
    several = question.gpus.machines > 1 and not question.slurm
    if several:
        blanks.append(Blank("MASTER_ADDR", "name or address of the first machine", ()))
    where = ", the same on every machine" if several else ""
    lines = [*_batch_script(question)] if question.slurm else []
    if blanks:
        lines += [f"# Fill these in{where}:", *(blank.line for blank in blanks)]
    if several:
        lines.append(
            f"# NODE_RANK: the number of the machine, 0 for the first to "
            f"{question.gpus.machines - 1} for the last"
        )
    gpus = question.gpus
    torchrun = torchrun_pieces(str(gpus.machines), str(gpus.per_machine))
    start = [*SRUN, PROGRAM_BY_PYTHON] if question.slurm else torchrun
    return "\n".join([*lines, *_continued([start, *paragraphs])])


def _batch_script(question: Question) -> Iterator[str]:
    """Yield the head of a batch script for Slurm: a process for every GPU."""
    gpus = question.gpus
    yield "#!/usr/bin/env bash"
    yield "#SBATCH --job-name=pretrain-gpt"
    yield f"#SBATCH --nodes={gpus.machines}"
    yield f"#SBATCH --ntasks-per-node={gpus.per_machine}"
    yield f"#SBATCH --gpus-per-node={gpus.per_machine}"
    yield "#SBATCH --exclusive"
    yield "#SBATCH --signal=TERM@300"


SRUN: Final = ("exec srun", "--kill-on-bad-exit=1", "--cpu-bind=none")
"""The pieces of srun that every job has: no rank goes on alone, and each chooses its cores."""

_ONLY_IN_A_CHECKOUT: Final = Path(__file__).resolve().parents[2] / "pretrain_gpt.sh"
_PROGRAM: Final = "pretrain_gpt.py" if _ONLY_IN_A_CHECKOUT.is_file() else "-m pretrain_gpt"
"""The training: the script of a checkout, or the module of an installation."""

PROGRAM_BY_PYTHON: Final = f"python {_PROGRAM}"


def torchrun_pieces(machines: str, per_machine: str) -> list[str]:
    """Return the pieces of a line that start the program by torchrun.

    Args:
        machines: number of machines, as a shell reads it.
        per_machine: ranks of a machine, as a shell reads it.
    """
    ranks = f"--nproc-per-node {per_machine}"
    if machines == "1":
        return ["torchrun", "--standalone", ranks, _PROGRAM]
    return [
        "torchrun",
        f"--nnodes {machines}",
        ranks,
        '--node-rank "${NODE_RANK:?the number of this machine}"',
        '--master-addr "${MASTER_ADDR:?fill it in above}"',
        f"--master-port {PORT}",
        _PROGRAM,
    ]


def _of_checkpoints(question: Question) -> list[str]:
    """Return the words that make checkpoints in time, if the question does not give them."""
    own = [f"--save-interval {SAVE_INTERVAL}"] * ("--save-interval" not in question.options)
    asked = question.slurm and "--exit-signal-handler" not in question.options
    return own + ["--exit-signal-handler"] * asked


def _pieces(words: Sequence[str]) -> list[str]:
    """Return a piece of a command line for every flag, with its values, quoted for a shell."""
    return [shlex.join([option, *values]) for option, values in split(list(words))]


def _continued(paragraphs: Sequence[Sequence[str]]) -> Iterator[str]:
    r"""Yield the lines of one command. Each paragraph begins a line; all but the last end in \ ."""
    lines: list[str] = []
    for pieces in filter(None, paragraphs):
        line = ""
        for piece in pieces:
            indent = _INDENT if lines or line.startswith(_INDENT) else ""
            if line and len(line) + 1 + len(piece) > WIDTH:
                lines.append(line)
                line = _INDENT + piece
            else:
                line = f"{line} {piece}" if line else indent + piece
        lines.append(line)
    for at, line in enumerate(lines):
        yield line if at == len(lines) - 1 else f"{line} \\"
