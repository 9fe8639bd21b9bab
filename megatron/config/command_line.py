"""Reads the command line once: from words to flags, checks and one frozen ``RunConfig``."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tyro

from megatron.config.checks import check
from megatron.config.declare import all_declarations, parser_of
from megatron.config.flags import Flags
from megatron.config.resolve import resolve
from megatron.config.run_config import RunConfig
from megatron.config.words import sort_words

T = TypeVar("T")

_PARSER = parser_of(Flags)  # made once, as tyro remembers what it learns of a class

# How long a rank other than 0 keeps silent about a bad command line. Rank 0 reports it and ends the
# job at once. Others report only faults that rank 0 does not see (a file missing on one machine).
SILENT_SECONDS = 5.0


@dataclass(frozen=True)
class Reading:
    """A command line that was read.

    Attributes:
        flags: the flags; those with a mistake have their default.
        mistakes: a line on each mistake; it begins with the flag and names the way out.
        notes: a line on each flag that changes nothing, or is read as another; it begins with it.
    """

    flags: Flags
    mistakes: tuple[str, ...]
    notes: tuple[str, ...]


def parse(argv: Sequence[str], world_size: int, speak: bool = True) -> RunConfig:
    """Read a command line that must make a run.

    Args:
        argv: its words, without the program.
        world_size: ranks of the job.
        speak: whether help is printed.

    Returns:
        The configuration of the run.

    Raises:
        ValueError: there are mistakes; a line on each names the flag, the value and the way out.
        SystemExit: with 0 after ``--help``.
    """
    found = read(argv, world_size, speak)
    if found.mistakes:
        raise ValueError("\n".join(found.mistakes))
    return resolve(found.flags, found.notes)


def read(argv: Sequence[str], world_size: int, speak: bool = True) -> Reading:
    """Read a command line, with or without mistakes.

    Args:
        argv: its words, without the program.
        world_size: ranks of the job.
        speak: whether help is printed.

    Raises:
        SystemExit: with 0 after ``--help``.
    """
    words = sort_words(argv, all_declarations(Flags), world_size)
    asks_help = not {"-h", "--help"}.isdisjoint(argv)
    flags = _read(["--help"] if asks_help else words.words, speak)
    found = check(flags, world_size, words.unreadable)
    return Reading(flags, (*words.mistakes, *found.mistakes), (*words.notes, *found.notes))


def _read(words: Sequence[str], speak: bool) -> Flags:
    try:
        return tyro.cli(
            _PARSER,
            prog="pretrain_gpt.py",
            args=words,
            config=(
                tyro.conf.OmitArgPrefixes,
                tyro.conf.FlagCreatePairsOff,
                tyro.conf.HelptextFromCommentsOff,
            ),
            console_outputs=speak,
        )
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(f"{' '.join(words)}: these words make no flags; see --help") from end


def parse_or_exit(
    argv: Sequence[str], rank: int, world_size: int, silent_seconds: float = SILENT_SECONDS
) -> RunConfig:
    """Read a command line for one rank of a job; a fault ends the process without a traceback.

    Args:
        argv: the words, without the program.
        rank: this rank. Rank 0 reports a fault; the others wait for it to end the job, so that
            the launcher does not end rank 0 before it has spoken.
        world_size: ranks of the job.
        silent_seconds: how long the others wait before they report a fault of their own.

    Returns:
        The configuration of the run.

    Raises:
        SystemExit: with 2 after a fault, with 0 after ``--help``.
    """
    return or_exit(lambda: parse(argv, world_size, speak=rank == 0), rank, silent_seconds)


def or_exit(work: Callable[[], T], rank: int, silent_seconds: float = SILENT_SECONDS) -> T:
    """Return the result of ``work``; a user's mistake ends the process without a traceback.

    Args:
        work: is done by every rank for itself, before any process group exists.
        rank: this rank; see ``parse_or_exit``.
        silent_seconds: how long ranks other than 0 wait before they report.

    Raises:
        SystemExit: with 2 if ``work`` raised a ``ValueError`` or ``OSError``.
    """
    try:
        return work()
    except (ValueError, OSError) as error:
        fault = f"error: {error}"
    if rank > 0:
        time.sleep(silent_seconds)
        fault = f"[rank {rank}] {fault}"
    print(fault, file=sys.stderr, flush=True)
    sys.exit(2)
