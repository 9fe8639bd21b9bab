"""The question of the command ``plan`` as its command line asks it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.planning.asked.gpus import AskedGpus


@dataclass(frozen=True)
class Question:
    """The job whose layout and plan are asked for.

    Attributes:
        words: flags of ``pretrain_gpt.py`` that do not depend on the layout: the model, the
            sequence length, the global batch, the precision, and all further flags of the command
            line. The search adds the words of its choices behind them.
        gpus: the GPUs.
        batch: samples of an iteration.
        seq_length: tokens of a sample.
        tokens: tokens to train on; ``None``: not told.
        model: the file that tells of the model; ``None``: flags tell of it.
        slurm: whether the line to run is one of Slurm.
        json: whether the answer is one JSON object.
        notes: lines on how words were read, for the user.
    """

    words: tuple[str, ...]
    gpus: AskedGpus
    batch: int
    seq_length: int
    tokens: int | None = None
    model: Path | None = None
    slurm: bool = False
    json: bool = False
    notes: tuple[str, ...] = ()


def dry_run_words(gpus: AskedGpus, replicas: int) -> tuple[str, ...]:
    """Return the words that make a dry run on these GPUs of a command line.

    Args:
        gpus: the GPUs.
        replicas: replicas of the model, that is all GPUs / (t x c x p).
    """
    raise NotImplementedError


def question_of(argv: Sequence[str] | None, about: str | None) -> Question:
    """Return the question of a command line; ``about`` is the purpose of the command, for its help.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 after printing all mistakes.
    """
    raise NotImplementedError
