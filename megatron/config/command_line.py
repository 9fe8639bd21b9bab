"""Reads the command line once: from words to flags, checks and one frozen ``RunConfig``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import tyro

from megatron.config.checks import check
from megatron.config.declare import all_declarations, filled, parser_of, parser_of_given
from megatron.config.flags import Flags
from megatron.config.resolve import number_of_replicas, resolve
from megatron.config.run_config import RunConfig
from megatron.config.saved_model import add_saved_model
from megatron.config.words import sort_words

T = TypeVar("T")


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
    return resolve(found.flags, found.notes, world_size)


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
    add_saved_model(words)
    if not {"-h", "--help"}.isdisjoint(argv):
        _parsed(parser_of(Flags), ["--help"], speak)
    given: object = _parsed(parser_of_given(Flags, words.given), words.words, speak)
    flags = with_default_batch(filled(Flags, vars(given)), world_size)
    found = check(flags, world_size, words.unreadable)
    return Reading(flags, (*words.mistakes, *found.mistakes), (*words.notes, *found.notes))


def with_default_batch(flags: Flags, world_size: int) -> Flags:
    """Give an iteration one microbatch of every replica, if its batch size is not given."""
    train = flags.train
    if train.global_batch_size is not None or train.micro_batch_size is None:
        return flags
    batch = train.micro_batch_size * number_of_replicas(flags, world_size)
    return replace(flags, train=replace(train, global_batch_size=batch))


def _parsed(parser: type[T], words: Sequence[str], speak: bool) -> T:
    """Return what the words make of a dataclass that is annotated for tyro."""
    try:
        return tyro.cli(
            parser,
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
