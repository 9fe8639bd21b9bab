"""Reads the command line once: from words to flags, checks and one frozen ``RunConfig``."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Final

from megatron import run
from megatron.flags.checks import check
from megatron.flags.groups import Flags, Reading, filled
from megatron.flags.help import help_text
from megatron.flags.pipes import show
from megatron.flags.readable import readable
from megatron.flags.rules import FoundRule, Runs, modules_in, rules_in
from megatron.optimizer.rate_span_settings import RateSpanSettings
from megatron.optimizer.settings import OptimizerSettings
from megatron.run.choices import closed_notes, ways
from megatron.run.dry_run import DryRunSettings
from megatron.run.edit import edited
from megatron.run.parallelism import number_of_replicas
from megatron.run.run_config import RunConfig, resolve
from megatron.run.saved_model import add_saved_model
from megatron.run.saved_tokenizer import add_saved_tokenizer
from megatron.run.topics import DECLARED, GROUPS, TOPICS
from megatron.run.train import TrainSettings
from megatron.run.words import sort_words


def parse(argv: Sequence[str], world_size: int, speak: bool = True) -> RunConfig:
    """Read a command line that must make a run.

    Args:
        argv: words of the command line, without the program.
        world_size: ranks of the job.
        speak: whether help is printed.

    Returns:
        The configuration of the run.

    Raises:
        ValueError: there are mistakes. A line on each mistake names the flag, the value and the way
            out.
        SystemExit: with 0 after ``--help``.
    """
    found = read(argv, world_size, speak)
    if found.mistakes:
        raise ValueError("\n".join(found.mistakes))
    return run_of(found)


def run_of(found: Reading) -> RunConfig:
    """Return the run of flags without a mistake, with all ways that it leaves to its plan.

    Raises:
        ValueError: rules refuse all of these ways.
    """
    opened, flags = ways(found.flags), found.flags
    if not opened:
        return resolve(flags, found.notes)
    notes = (*found.notes, *closed_notes(flags))
    judgements = [(way, judged(edited(flags.given, way.edits), flags.world_size)) for way in opened]
    alternatives = [
        replace(resolve(own.flags, own.notes), taken=way.words, changes=way.changes)
        for way, own in judgements
        if not own.mistakes
    ]
    if not alternatives:
        raise ValueError("\n".join(judgements[0][1].mistakes))
    if len(alternatives) == 1:
        [only] = alternatives
        more = (note for note in only.notes if note not in notes)
        return replace(only, taken=(), changes=0, notes=(*notes, *more))
    return replace(alternatives[0], taken=(), alternatives=tuple(alternatives), notes=notes)


def read(argv: Sequence[str], world_size: int, speak: bool = True) -> Reading:
    """Read a command line, with or without mistakes.

    Args:
        argv: words of the command line, without the program.
        world_size: ranks of the job.
        speak: whether help is printed.

    Raises:
        SystemExit: with 0 after ``--help``.
    """
    if not {"-h", "--help"}.isdisjoint(argv):
        if speak:
            show(help_text("pretrain_gpt.py [flags]", _PURPOSE, TOPICS))
        raise SystemExit(0)
    words = sort_words(argv, DECLARED, world_size)
    add_saved_model(words, DECLARED)
    add_saved_tokenizer(words)
    found = judged(words.given, world_size, words.unreadable)
    return Reading(
        found.flags,
        (*map(readable, words.mistakes), *found.mistakes),
        (*map(readable, words.notes), *found.notes),
    )


def judged(
    given: Mapping[str, Sequence[str]], world_size: int, unreadable: Collection[str] = ()
) -> Reading:
    """Return the flags of a line, with the mistakes and notes of all rules.

    Args:
        given: the words behind each given flag, all of them readable.
        world_size: ranks of the job.
        unreadable: flags that were given and are missing in ``given``, because their words could
            not be read.
    """
    flags = without_training(with_default_batch(filled(GROUPS, given, world_size)))
    found = check(flags, rules_for("dry" if flags[DryRunSettings].dry_run else "real"), unreadable)
    return Reading(flags, tuple(map(readable, found.mistakes)), tuple(map(readable, found.notes)))


def rules_for(run: Runs) -> tuple[FoundRule, ...]:
    """Return the rules that hold for a kind of run."""
    return tuple(rule for rule in rules_in(modules_of_rules()) if rule.runs in ("all", run))


@cache
def modules_of_rules() -> tuple[ModuleType, ...]:
    """Return the modules in which rules stand: of this package, and of all nodes."""
    nodes = [sys.modules[group.__module__] for group in GROUPS]
    return tuple(dict.fromkeys((*modules_in(run), *nodes)))


def with_default_batch(flags: Flags) -> Flags:
    """Return the flags with a batch of one microbatch per replica, if no batch size is given."""
    train = flags[TrainSettings]
    if train.global_batch_size is not None or train.micro_batch_size is None:
        return flags
    batch = train.micro_batch_size * number_of_replicas(flags)
    return flags.replaced(replace(train, global_batch_size=batch))


def without_training(flags: Flags) -> Flags:
    """Return the flags with a length and a learning rate where a run without training lacks them.

    No step is taken, so neither of them changes anything. Without a length, spans of the learning
    rate are spans of nothing, so they are left out too.
    """
    train, optimizer, spans = (
        flags[TrainSettings],
        flags[OptimizerSettings],
        flags[RateSpanSettings],
    )
    if not train.skip_train:
        return flags
    if train.train_iters is None and train.train_samples is None:
        train = replace(train, train_iters=1)
        spans = RateSpanSettings()
        optimizer = replace(optimizer, lr_decay_style="constant")
    if optimizer.lr is None:  # required in training, so its type does not say so
        optimizer = replace(optimizer, lr=1.0)
    return flags.replaced(train, optimizer, spans)


_PURPOSE: Final = (
    "Pretrain GPT with vocabulary parallelism in pipeline parallelism. A word @FILE stands for the "
    "flags of a file, or of a recipe (docs/recipes.md)."
)
