"""The question of the command ``plan`` as its command line asks it."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, gcd
from pathlib import Path
from typing import Final

from megatron.flags.command import read
from megatron.flags.declare import derived, flag, required
from megatron.flags.groups import Flags, Rule, copied, faults_of, result_of
from megatron.flags.ranges import COUNT, LENGTH, Range
from megatron.flags.words import split
from megatron.planning.asked.amounts import samples_of, tokens_of
from megatron.planning.asked.gpus import FORMS, AskedGpus, gpus_of
from megatron.planning.asked.model import AskedModel, model_of
from megatron.planning.asked.unwanted import Unwanted, unknown_among, unwanted_of
from megatron.planning.search.dimensions import CHOSEN
from megatron.run import command_line
from megatron.run.flag_files import read_flag_files
from megatron.run.overrides import in_effect
from megatron.run.parallelism import ranks_of_replica
from megatron.run.topics import DECLARED
from megatron.run.train import batch_share
from megatron.simulator.costs.gpus import GIB
from megatron.simulator.ways_folder import fault_of_target


@dataclass(frozen=True)
class Question:
    """Model, GPUs and batch.

    The job whose layout and plan are asked for.

    Attributes:
        words: flags of ``pretrain_gpt.py`` that do not depend on the layout: the model, the
            sequence length, the global batch, the precision, and all further flags of the command
            line. The search adds the words of its choices behind them.
        notes: lines on how words were read, for the user.
    """

    # fmt: off
    gpus: AskedGpus = required(
        f"The GPUs: {FORMS}. Machines are as usual, if it is not said.", metavar="NxGPU",
        reads=gpus_of)
    seq_length: int = required("Tokens of a sample.", LENGTH)
    model: Path | None = flag(None,
        "The model: a folder of Hugging Face's form, or its config.json; no weights are needed. "
        "Flags of the model replace its values.", metavar="FOLDER|JSON",
        unset="by flags of pretrain_gpt.py, as --num-layers")
    global_batch_tokens: int | None = flag(None,
        "Tokens of an iteration, as 4M. They are a number of samples within 5 % that many layouts "
        "divide.", metavar="TOKENS", reads=tokens_of, unset="by --global-batch-size",
        excludes="--global-batch-size")
    global_batch_size: int = derived("Samples of an iteration.", COUNT,
        unset="by --global-batch-tokens")
    tokens: int | None = flag(None, "Tokens of the whole training, as 1T.", metavar="TOKENS",
        reads=tokens_of, unset="not told: days are not predicted")
    memory: float | None = flag(None,
        "GiB of a GPU's memory, if it has another size than usual, or if a job may take less.",
        Range(1, 100_000), unset="by the GPU")
    slurm: bool = flag(False, "Give a batch script for Slurm in place of a line for torchrun.")
    json: bool = flag(False, "Print the answer as one JSON object.")
    explore: Path | None = flag(None,
        "Write all ways that the search has looked at, with their timelines, into a folder: "
        "explore-schedules --candidates FOLDER (in a checkout: tools/explore.py) shows them as "
        "points.", metavar="FOLDER", unset="none")
    without: tuple[Unwanted, ...] = flag((),
        "A flag that no line of the answer may have, or one of its values: tp-comm-overlap, or "
        "pipeline-schedule=zb-v; may be given again.", metavar="FLAG[=VALUE]", reads=unwanted_of,
        repeats=True, unset="the search may choose all that it knows")
    # fmt: on

    words: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def options(self) -> frozenset[str]:
        """The flags that it gives."""
        return options_in(self.words)

    @property
    def batch_tokens(self) -> int:
        """Tokens of an iteration."""
        return self.global_batch_size * self.seq_length

    def resolved(self, others: Sequence[str]) -> "Question":
        """Return the question with all derived values.

        Args:
            others: words of further flags, which ``pretrain_gpt.py`` knows.

        Raises:
            ValueError: the model is not known, or the tokens of the batch are no number of samples.
        """
        batch, notes = self.global_batch_size, list[str]()
        if batch is None:
            assert self.global_batch_tokens is not None, "one of the two is required"
            batch = samples_of(self.global_batch_tokens, self.seq_length)
            notes += _told(self.global_batch_tokens, batch, self.seq_length)
        asked = None if self.model is None else model_of(self.model, self.seq_length)
        notes += asked.notes if asked else ()
        given, gpus = options_in(others), self.gpus
        if self.memory is not None:
            gpus = replace(gpus, gpu=replace(gpus.gpu, memory=self.memory * GIB))
        words = [*_model_words(self, asked, given), "--global-batch-size", str(batch)]
        if self.tokens is not None and given.isdisjoint(LENGTHS):
            words += ["--train-iters", str(ceil(self.tokens / (batch * self.seq_length)))]
        if given.isdisjoint(("--bf16", "--fp16")):
            words.append("--bf16")
        return copied(
            Question,
            self,
            gpus=gpus,
            global_batch_tokens=None,  # the samples stand for them
            global_batch_size=batch,
            words=(*words, *others),
            notes=tuple(notes),
        )


def options_in(words: Iterable[str]) -> frozenset[str]:
    """Return the flags among words of a command line."""
    return frozenset(option for option, _ in split(list(words)))


LENGTHS: Final = frozenset({"--train-iters", "--train-samples"})
_FREE: Final = {"--micro-batch-size": "1", "--train-iters": "1", "--lr": "1"}
"""Flags that a dry run needs, with values for those that are not given yet."""


def dry_run_words(question: Question, words: Sequence[str], replicas: int) -> list[str]:
    """Return the command line of a dry run, to be parsed for a single rank.

    Args:
        question: the question.
        words: flags of the layout and the plan.
        replicas: replicas of the model: all GPUs / (t x c x p).
    """
    line, gpus = [*question.words, *words], question.gpus
    given = options_in(line)
    for option, value in _FREE.items():
        if option not in given and not (option in LENGTHS and given & LENGTHS):
            line += [option, value]
    line += ["--dry-run", "--dry-run-gpu", gpus.gpu.name, "--dry-run-replicas", str(replicas)]
    return [*line, "--ranks-per-node", str(gpus.per_machine)]


_PREDICTS: Final = frozenset(
    {"--dry-run", "--dry-run-gpu", "--dry-run-replicas", "--ranks-per-node"}
)
"""Flags whose values follow from --gpus."""


def question_of(argv: Sequence[str] | None, about: str | None) -> Question:
    """Return the question of a command line.

    Args:
        argv: words of the command line, without the program; ``None``: the words of this process.
        about: purpose of the command, for its help.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 after printing all mistakes.
    """
    others: list[str] = []
    given = read_flag_files(sys.argv[1:] if argv is None else argv)
    own, replaced = in_effect(given.flags, DECLARED)
    words = [word for flag in own for word in flag.words]
    rules: list[Rule] = [lambda _: iter(given.mistakes), partial(_mistakes, others)]
    flags = read(words, about, Question, rules=rules, others=others)
    question = flags[Question].resolved(others)
    return replace(question, notes=(*given.notes, *replaced, *question.notes))


def _mistakes(others: Sequence[str], flags: Flags) -> Iterator[str]:
    """Yield a line on each mistake of the job: in its model, its batch, and its further flags."""
    own = flags[Question]
    if own.global_batch_size is None and own.global_batch_tokens is None:
        yield "--global-batch-tokens is missing: give it, as 4M, or --global-batch-size in samples"
        return
    if own.explore is not None and (fault := fault_of_target(own.explore)):
        yield f"--explore {own.explore}: {fault}"
    yield from unknown_among(own.without, CHOSEN)
    given = options_in(others)
    if own.tokens is not None and (length := given & LENGTHS):
        yield f"--tokens does not go with {' and '.join(sorted(length))}: give one of them"
    for option in sorted(given & _PREDICTS):
        yield f"{option}: this command predicts anyway, for --gpus {own.gpus}; leave it out"
    resolved = partial(own.resolved, others)
    yield from faults_of(resolved)
    if (question := result_of(resolved)) is not None:
        yield from _mistakes_in_flags(question)


def _mistakes_in_flags(question: Question) -> Iterator[str]:
    """Yield a line on each mistake in the flags of ``pretrain_gpt.py``."""
    flags = command_line.read(dry_run_words(question, (), 1), 1, speak=False).flags
    ranks, all_ranks = max(1, ranks_of_replica(flags)), question.gpus.count
    if all_ranks % ranks:
        yield (
            f"--gpus {question.gpus} are {all_ranks} GPUs, which the {ranks} ranks of a replica "
            "(tensor x context x pipeline) do not divide: choose sizes that do, or leave them out"
        )
        return
    replicas = 1
    if "--expert-model-parallel-size" in question.options:  # experts are spread over replicas
        replicas = gcd(all_ranks // ranks, batch_share(flags).microbatches) or 1
    line = dry_run_words(question, (), replicas)
    yield from command_line.read(line, 1, speak=False).mistakes


def _model_words(own: Question, asked: AskedModel | None, given: frozenset[str]) -> tuple[str, ...]:
    """Return the words of the model that the command line does not give."""
    if asked is None:
        return ("--seq-length", str(own.seq_length))
    return asked.words_without(given)


def _told(tokens: int, batch: int, seq_length: int) -> list[str]:
    """Return a line on the samples that stand for tokens, if they are not as many."""
    if tokens == batch * seq_length:
        return []
    return [
        f"--global-batch-tokens {tokens:,} are {batch} samples of {seq_length:,}: "
        f"{batch * seq_length:,} tokens"
    ]
