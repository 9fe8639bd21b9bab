"""The answers of ``pretrain_gpt.py`` to the flags of a script, by its own parser in a dry run."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from megatron.flags.declare import option_of
from megatron.flags.groups import Reading
from megatron.foreign.flags import (
    NOT_WRITABLE,
    Flag,
    name_here,
    sorted_flags,
    without_quotes,
)
from megatron.foreign.launches import Launch, Ranks
from megatron.foreign.values import Hole, Holes
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.settings import PipelineRankSettings, TensorRankSettings
from megatron.run.command_line import read
from megatron.run.expert_ranks import sizes_of_experts
from megatron.run.schedule import ACCOUNTS, ASKING_FOR_TREATMENTS, ENDS, LAYOUT, treatment_of
from megatron.run.told import Told, is_of, told_of
from megatron.schedules.treatments import TREATMENTS

SPLIT: Final = "vocab-2"
"""The treatment of the second line."""

VOCABULARY: Final = 32_000
"""Entries of the vocabulary that a line is judged with, if they are not told: a rule's answer does
not depend on their number."""

_ENDS: Final = tuple(map(option_of, (*ENDS, *ACCOUNTS, LAYOUT, "final_stage_num_layers")))
"""Flags that make room for the vocabulary layers, which a split needs no longer."""

_SPLITS: Final = (*ASKING_FOR_TREATMENTS, "--disable-backward-fusion")
"""Flags that name a treatment."""

_OF_DRY_RUNS: Final = ("not read in a dry run", "--dry-run counts")
_ONE_REPLICA: Final = "there is one replica of the model"
_MORE_REPLICAS: Final = " (--dry-run-replicas N plans more)"
"""Parts of lines that a dry run says of itself."""


@dataclass(frozen=True)
class Sizes:
    """Ranks of a job by axis.

    Attributes:
        t, c, p: tensor-, context- and pipeline-parallel ranks.
        e: ranks over which experts are spread.
        world: all ranks; ``None``: not known.
    """

    t: int
    c: int
    p: int
    e: int
    world: int | None

    @property
    def of_replica(self) -> int:
        """Ranks of a replica."""
        return self.t * self.c * self.p

    @property
    def d(self) -> int | None:
        """Replicas; ``None``: not known, or the ranks make no whole number of them."""
        if self.world is None or self.world % self.of_replica:
            return None
        return self.world // self.of_replica


@dataclass(frozen=True)
class Variant:
    """A line to run here.

    Attributes:
        flags: its flags.
        left_out: flags of the script that are left out, each with the reason.
        added: flags that the script does not have.
        changes: lines on what must be changed before the line runs.
        notes: lines on flags that change nothing, or are read as others.
    """

    flags: tuple[Flag, ...]
    left_out: tuple[Told, ...] = ()
    added: tuple[Flag, ...] = ()
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """A training of a script with all answers.

    Attributes:
        launch: the training.
        ranks: its processes, after the command line's own numbers.
        flags: all its flags.
        told: the answer to every flag, then lines on flags that are missing.
        unknown: flags whose values are not known.
        further: holes in place of further flags.
        stray: words that belong to no flag.
        unquoted: values with quotes that would reach the program; they are left out.
        sizes: ranks by axis.
        unsized: flags of ``sizes`` whose values are not known.
        treatment: of the vocabulary.
        vocabulary: entries of the vocabulary; ``None``: the tokenizer tells them.
        as_is: the line without the flags that are refused.
        split: the same with the vocabulary split; ``None``: the line splits it already.
        dispensable: flags that a split makes needless.
        other_defaults: lines on flags that the script leaves out and that have another default.
    """

    launch: Launch
    ranks: Ranks
    flags: tuple[Flag, ...]
    told: tuple[Told, ...]
    unknown: tuple[Flag, ...]
    further: tuple[Hole, ...]
    stray: tuple[str, ...]
    unquoted: tuple[str, ...]
    sizes: Sizes
    unsized: tuple[str, ...]
    treatment: str
    vocabulary: int | None
    as_is: Variant
    split: Variant | None
    dispensable: tuple[str, ...]
    other_defaults: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """Facts about a training besides its flags.

    Attributes:
        holes: the holes of its script.
        ranks: its processes.
        vocabulary: entries of the vocabulary, if the command line tells them.
    """

    holes: Holes
    ranks: Ranks
    vocabulary: int | None = None

    def dry_words(self, flags: Sequence[Flag], replicas: int) -> list[str]:
        """Return the command line of a dry run of some flags, with holes as the script has them.

        No word of it names a file of flags: flags that cannot be written otherwise are left out.
        """
        given = {flag.option for flag in flags}
        written = (flag for flag in flags if not flag.fault(self.holes))
        words = [self.holes.shown(word) for flag in written for word in flag.words(self.holes)]
        words += ["--dry-run", "--dry-run-replicas", str(replicas)]
        if "--vocab-size" not in given:
            words += ["--vocab-size", str(self.vocabulary or VOCABULARY)]
        return words

    def read(self, flags: Sequence[Flag], replicas: int = 1) -> Reading:
        """Read a line, without mistakes about values that are not known."""
        found = read(self.dry_words(flags, replicas), 1, speak=False)
        texts = {hole.text for flag in flags for v in flag.values for hole in self.holes.within(v)}
        mistakes = [line for line in found.mistakes if not any(text in line for text in texts)]
        faults = [fault for flag in flags if (fault := flag.fault(self.holes))]
        return Reading(
            found.flags,
            (*faults, *self._of_a_run(mistakes)),
            tuple(self._of_a_run(found.notes)),
        )

    def _of_a_run(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield lines on a line's flags, without lines that only a dry run has."""
        silent = list(_OF_DRY_RUNS)
        if self.ranks.world_size is None:
            silent.append(_ONE_REPLICA)
        for line in lines:
            if not any(text in line for text in silent):
                yield line.replace(_MORE_REPLICAS, "")


def judgement_of(launch: Launch, job: Job) -> Judgement:
    """Return the answers to a training's flags, and the lines to run here.

    Args:
        launch: the training.
        job: facts about the training besides its flags.
    """
    flags, further, stray = sorted_flags(launch.words, job.holes)
    usual = _usual(flags, launch)
    flags = (*flags, *usual)
    first = job.read(flags)
    sizes = _sizes(first, job.ranks.world_size)
    replicas = sizes.d or _fewest_replicas(first, sizes)
    found = job.read(flags, replicas)
    told = _told(flags, found, job.holes)
    as_is = replace(_as_is(flags, told, job, replicas), added=usual)
    kept = job.read(as_is.flags, replicas)
    treatment = treatment_of(kept.flags)
    is_split = treatment in TREATMENTS and TREATMENTS[treatment].is_sharded
    unknown = tuple(flag for flag in flags if any(job.holes.within(v) for v in flag.values))
    names = {flag.option for flag in flags}
    given = kept.flags.given.get("--vocab-size", ("",))[0] if "--vocab-size" in names else ""
    split = None if is_split else _split(as_is, kept, job, replicas)
    rest = () if split is None else split.flags
    return Judgement(
        launch,
        job.ranks,
        flags,
        tuple(told),
        unknown,
        tuple(hole for word in further for hole in job.holes.within(word)),
        tuple(map(job.holes.shown, stray)),
        tuple(job.holes.shown(word) for word in launch.words if without_quotes(word) != word),
        sizes,
        tuple(flag.shown(job.holes) for flag in unknown if name_here(flag.option) in _SIZES),
        treatment,
        int(given) if given.isdigit() else job.vocabulary,
        as_is,
        split,
        tuple(flag.shown(job.holes) for flag in rest if flag.option in _ENDS),
        tuple(_other_defaults({flag.option for flag in flags}, sizes)) if launch.line else (),
    )


def _usual(flags: Sequence[Flag], launch: Launch) -> tuple[Flag, ...]:
    """Return flags that Megatron-LM's pretrain_gpt.py adds to a line without them."""
    options = {name_here(flag.option) for flag in flags}
    files = {"--vocab-file", "--merge-file"}
    if launch.line and files <= options and "--tokenizer-type" not in options:
        return (Flag("--tokenizer-type", ("GPT2BPETokenizer",)),)
    return ()


def _other_defaults(options: Collection[str], sizes: Sizes) -> Iterator[str]:
    """Yield flags that the script leaves out and that have another default here."""
    if sizes.c > 1 and "--cp-comm-type" not in options:
        yield "--cp-comm-type is p2p there and all_gather here; add --cp-comm-type p2p for the same"
    if {"--eval-interval", "--eval-iters"}.isdisjoint(options):
        yield "a run evaluates every 1,000 iterations there and never here; --eval-interval N asks"


_SIZES: Final = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
    *("--context-parallel-size", "--expert-model-parallel-size"),
)


def _sizes(found: Reading, world: int | None) -> Sizes:
    return Sizes(
        found.flags[TensorRankSettings].size,
        found.flags[ContextRankSettings].size,
        found.flags[PipelineRankSettings].size,
        sizes_of_experts(found.flags)[0],
        world,
    )


def _fewest_replicas(found: Reading, sizes: Sizes) -> int:
    """Return the fewest replicas whose ranks can share the experts."""
    block = prod(sizes_of_experts(found.flags))
    return max(1, block // (sizes.t * sizes.c))


def _told(flags: Sequence[Flag], found: Reading, holes: Holes) -> list[Told]:
    shown = [(flag.option, *map(holes.shown, flag.values)) for flag in flags]
    return told_of(shown, found.mistakes, found.notes)


def _is_left_out(told: Told) -> bool:
    """Return whether a refused flag asks for a missing feature, or is no flag."""
    is_odd = told.line.endswith(NOT_WRITABLE) or " is no flag: " in told.line
    return bool(told.feature) or is_odd


def _as_is(flags: Sequence[Flag], told: Sequence[Told], job: Job, replicas: int) -> Variant:
    """Return the line without the refused flags whose effect cannot be had."""
    answers = dict(zip(flags, told, strict=False))
    out = {f for f in flags if answers[f].verdict == "refused" and _is_left_out(answers[f])}
    while True:
        kept = tuple(flag for flag in flags if flag not in out)
        found = job.read(kept, replicas)
        needed = {
            flag
            for flag in out
            if not flag.fault(job.holes) and any(is_of(m, flag.option) for m in found.mistakes)
        }
        if not needed:
            break
        out -= needed
    left_out = tuple(answers[flag] for flag in flags if flag in out)
    return Variant(kept, left_out, (), found.mistakes, found.notes)


def _split(as_is: Variant, before: Reading, job: Job, replicas: int) -> Variant:
    """Return the line with the vocabulary split, without flags that contradict the split."""
    own = Flag("--vocab-parallel", (SPLIT,))
    kept = tuple(flag for flag in as_is.flags if flag.option not in _SPLITS)
    left_out = [
        Told(flag.shown(job.holes), "refused", f"{flag.option} names another treatment")
        for flag in as_is.flags
        if flag.option in _SPLITS
    ]
    found = job.read((*kept, own), replicas)
    taken, added = (kept, found, _new(found.mistakes, before.mistakes)), (own,)
    named = {line.split()[0] for line in taken[2]}
    against = [flag for flag in kept if named & _read_as(flag, before, job.holes)]
    rest = tuple(flag for flag in kept if flag not in against)
    for flags, more in ((kept, _REMAINDER), (rest, ()), (rest, _REMAINDER)):
        if not taken[2]:
            break
        found = job.read((*flags, *more, own), replicas)
        faults = _new(found.mistakes, before.mistakes)
        if len(faults) < len(taken[2]):
            taken, added = (flags, found, faults), (*more, own)
    kept, found, _ = taken
    if kept is rest:
        left_out += [
            Told(flag.shown(job.holes), "refused", f"{SPLIT} spreads the vocabulary layers evenly")
            for flag in against
        ]
    notes = _new(found.notes, before.notes)
    return Variant((*kept, *added), tuple(left_out), added, found.mistakes, tuple(notes))


_REMAINDER: Final = (Flag("--layer-distribution", ("remainder",)),)
"""The flag with which stages need not have equally many layers."""


def _read_as(flag: Flag, found: Reading, holes: Holes) -> set[str]:
    """Return a flag, and the flags that it is read as."""
    begin = f"{flag.shown(holes)} is read as "
    notes = (note.removeprefix(begin) for note in found.notes if note.startswith(begin))
    return {flag.option, *(word for note in notes for word in note.split())}


def _new(lines: Iterable[str], before: Iterable[str]) -> list[str]:
    known = set(before)
    return [line for line in lines if line not in known]


def with_numbers(ranks: Ranks, machines: int | None, per_machine: int | None) -> Ranks:
    """Return the processes of a training with the numbers of the command line.

    Args:
        ranks: as the script tells them.
        machines: machines; ``None``: as the script tells.
        per_machine: processes of a machine; ``None``: as the script tells.
    """
    total = ranks.total or 0
    if per_machine and not machines and total % per_machine == 0:
        machines = total // per_machine or None
    elif machines and not per_machine and total % machines == 0:
        per_machine = total // machines or None
    return replace(
        ranks,
        machines=machines or ranks.machines,
        per_machine=per_machine or ranks.per_machine,
    )
