"""Reads the command line once: from words to flags, checks and one frozen ``RunConfig``."""

from collections.abc import Sequence

import tyro

from megatron.config.checks import mistakes
from megatron.config.declare import all_declarations, parser_of
from megatron.config.flags import Flags
from megatron.config.resolve import resolve
from megatron.config.run_config import RunConfig
from megatron.config.words import sort_words

_PARSER = parser_of(Flags)  # made once, as tyro remembers what it learns of a class


def parse(argv: Sequence[str], world_size: int, speak: bool = True) -> RunConfig:
    """Read a command line.

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
    found = sort_words(argv, all_declarations(Flags))
    asks_help = not {"-h", "--help"}.isdisjoint(argv)
    flags = _read(["--help"] if asks_help else found.words, speak)
    faults = [*found.mistakes, *mistakes(flags, world_size, found.unreadable)]
    if faults:
        raise ValueError("\n".join(faults))
    return resolve(flags, tuple(found.notes))


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
