"""Load a plan from a file; check that it can be run and that it is the requested plan."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal, NamedTuple

from megatron.native.files import read_text
from megatron.schedules.check import check
from megatron.schedules.counted import counted
from megatron.schedules.plan import Plan
from megatron.schedules.treatments import TREATMENTS

_WAY_OUT: Final = "give one that simulate-schedule --save-plan wrote"


def load_plan(path: Path, ranks: int, microbatches: int, vocabulary: str, slices: int = 1) -> Plan:
    """Return the checked plan of a training iteration from a file.

    Args:
        path: the plan in text form.
        ranks: the number of ranks that the plan must have.
        microbatches: the number of microbatches that the plan must have.
        vocabulary: the treatment of the vocabulary that the plan must have.
        slices: the number of slices that every microbatch must have.

    Raises:
        ValueError: if the file holds no plan, a plan that cannot be run, or a plan with other
            ranks, microbatches, slices or treatment. The message names the file.
    """
    plan = load_any_plan(path)
    found = list(misfits(plan, ranks, microbatches, vocabulary, slices))
    if found:
        faults = [
            f"{path} {misfit.fault}: ask for {misfit.found}, or give another file"
            for misfit in found
        ]
        raise ValueError("\n".join(faults))
    return plan


class Misfit(NamedTuple):
    """A difference between a plan and the requested plan.

    Attributes:
        field: the name of the field of ``Request`` that differs.
        found: the value that the plan has, in words.
        wanted: the value that is requested.
    """

    field: Literal["ranks", "microbatches", "slices", "vocabulary"]
    found: str
    wanted: str

    @property
    def fault(self) -> str:
        """The rest of a sentence that begins with the name of the file."""
        kind = "the vocabulary treatment " if self.field == "vocabulary" else ""
        return f"is a plan for {kind}{self.found}, not {self.wanted}"


def misfits(
    plan: Plan, ranks: int, microbatches: int, vocabulary: str, slices: int = 1
) -> Iterator[Misfit]:
    """Yield all differences between a checked plan and the requested plan.

    Args:
        plan: any plan of an iteration.
        ranks: pipeline ranks of the wanted plan.
        microbatches: microbatches of the wanted plan.
        vocabulary: treatment of the vocabulary in the wanted plan.
        slices: slices of a microbatch in the wanted plan.
    """
    if plan.ranks != ranks:
        yield Misfit("ranks", counted(plan.ranks, "rank"), counted(ranks, "rank"))
    if plan.microbatches != microbatches:
        own, other = (counted(m, "microbatch") for m in (plan.microbatches, microbatches))
        yield Misfit("microbatches", own, other)
    if plan.slices != slices:
        own, other = (counted(n, "slice of a microbatch") for n in (plan.slices, slices))
        yield Misfit("slices", own, other)
    names = treatments_of(plan)
    if vocabulary not in names:
        yield Misfit("vocabulary", " or ".join(names), vocabulary)


def treatments_of(plan: Plan) -> list[str]:
    """Return the names of the treatments of the vocabulary that a checked plan may have."""
    return [name for name, own in TREATMENTS.items() if own.in_plan == plan.treatment]


def load_any_plan(path: Path) -> Plan:
    """Return the checked plan of a training iteration in a file, of any size and treatment.

    Raises:
        ValueError: the file holds no plan, or a plan that cannot be run, or a plan for evaluation
            only. The message names the file.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise ValueError(f"cannot read the plan file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} holds no plan: it {error}; {_WAY_OUT}") from error
    return _checked(path, text)


@lru_cache(maxsize=1)  # a run reads the file for its stages, for its costs and for its plan
def _checked(path: Path, text: str) -> Plan:
    """Return the checked plan that a file's ``text`` holds; the same text is checked only once."""
    try:
        plan = Plan.from_text(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        check(plan)
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be run: mend it, or save another with simulate-schedule --save-plan: "
            f"{error}"
        ) from error
    if plan.forward_only:
        raise ValueError(
            f"{path} is 'forward only', a plan that evaluates: a training iteration needs its B as "
            "well; give another file"
        )
    return plan
