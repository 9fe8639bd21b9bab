"""Predicts both lines on a GPU: the vocabulary as it is, and split.

The forecast is that of a dry run, by a plan of few microbatches from which the time of all of them
follows (``planning.estimate``).
"""

from dataclasses import dataclass
from typing import Final

from megatron.foreign.flags import Flag
from megatron.foreign.judge import Job, Judgement
from megatron.planning.estimate import Estimate
from megatron.planning.run_plan import asked
from megatron.run.edit import set_to
from megatron.run.line import Line
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import Gpu

SECONDS: Final = 30.0
"""Seconds of work for each plan."""

_TYPES: Final = frozenset({"--bf16", "--fp16"})


@dataclass(frozen=True)
class Gain:
    """Both lines on a GPU.

    Attributes:
        gpu: the GPU.
        names: the two treatments of the vocabulary: whole, and split.
        whole, split: time and memory of an iteration; ``None``: the line cannot be planned.
        faults: reasons why a line cannot be planned.
        notes: sentences on assumptions.
    """

    gpu: Gpu
    names: tuple[str, str]
    whole: Estimate | None
    split: Estimate | None
    faults: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def gain(self) -> float | None:
        """By how much the split makes an iteration faster, as a share; ``None``: not known."""
        if self.whole is None or self.split is None:
            return None
        return self.whole.seconds / self.split.seconds - 1


def gain_of(own: Judgement, job: Job, gpu: Gpu) -> Gain:
    """Return the prediction of a training with its vocabulary whole and split.

    Raises:
        ValueError: the script leaves open what a prediction needs; the message names it.
    """
    _check(own)
    own_flags = list(own.as_is.flags)
    notes = []
    if _TYPES.isdisjoint(flag.option for flag in own_flags):
        own_flags.append(Flag("--bf16"))
        notes.append("the script trains in fp32; a prediction is for 16 bits, so with --bf16")
    if own.split is None:
        base = _line(own_flags, own, job, gpu)
        lines = (base.edited((set_to("--vocab-parallel", "none"),)), base)
        names = ("none", own.treatment)
    else:
        more = [flag for flag in own_flags if flag not in own.as_is.flags]
        lines = (_line(own_flags, own, job, gpu), _line([*own.split.flags, *more], own, job, gpu))
        names = (own.treatment, "vocab-2")
    found, faults = list[Estimate | None](), list[str]()
    for name, line in zip(names, lines, strict=True):
        try:
            found.append(_estimate(line, gpu))
        except ValueError as error:
            found.append(None)
            faults.append(f"{name}: {error}")
    return Gain(gpu, names, found[0], found[1], tuple(faults), tuple(notes))


def _check(own: Judgement) -> None:
    """Refuse a training of which too little is known.

    Raises:
        ValueError: names what is missing, all at once.
    """
    faults = [f"{flag}: not known" for flag in own.unsized]
    if own.vocabulary is None:
        faults.append("the entries of the vocabulary: add --vocab-size N")
    if own.sizes.world is None:
        faults.append("the ranks: add --nodes N and --gpus-per-node N")
    elif own.sizes.d is None:
        faults.append(
            f"{own.sizes.world} ranks are no multiple of t x c x p = {own.sizes.of_replica}"
        )
    if faults:
        raise ValueError("--predict needs " + "; ".join(faults))
    if own.as_is.changes:
        raise ValueError("--predict needs a line that runs: " + "; ".join(own.as_is.changes))


def _line(flags: list[Flag] | tuple[Flag, ...], own: Judgement, job: Job, gpu: Gpu) -> Line:
    words = job.dry_words(flags, own.sizes.d or 1)
    words += ["--dry-run-gpu", gpu.name]
    if own.ranks.per_machine and all(flag.option != "--ranks-per-node" for flag in flags):
        words += ["--ranks-per-node", str(own.ranks.per_machine)]
    return Line.of(words, 1)


def _estimate(line: Line, gpu: Gpu) -> Estimate:
    watch = Watch().counting(SECONDS)
    candidate = asked(line.run(gpu), watch=watch)[0]
    return candidate.estimate(watch, gpu, plain=True)
