"""Load a plan from a file; check that it can be run and that it is the plan that is wanted."""

from pathlib import Path
from typing import Final

from megatron.native.files import read_text
from megatron.schedules.check import check
from megatron.schedules.plan import Plan
from megatron.schedules.treatments import TREATMENTS

_WAY_OUT: Final = "give one that tools/simulate.py --save-plan wrote"


def load_plan(path: Path, ranks: int, microbatches: int, vocabulary: str) -> Plan:
    """Return the checked plan of a training iteration from a file.

    Args:
        path: the plan in text form.
        ranks: the number of ranks that it must have.
        microbatches: the number of microbatches that it must have.
        vocabulary: the treatment of the vocabulary that it must have.

    Raises:
        ValueError: if the file holds no plan, one that cannot be run, or one with other ranks,
            microbatches or treatment. The message names the file.
    """
    plan = load_any_plan(path)
    if plan.forward_only:
        raise ValueError(
            f"{path} is 'forward only', a plan that evaluates: a training iteration needs its B as "
            "well; give another file"
        )
    for found, wanted in (
        (_counted(plan.ranks, "rank"), _counted(ranks, "rank")),
        (_counted(plan.microbatches, "microbatch"), _counted(microbatches, "microbatch")),
    ):
        if found != wanted:
            raise ValueError(
                f"{path} is a plan for {found}, not {wanted}: ask for {found}, or give another file"
            )
    names = treatments_of(plan)
    if vocabulary not in names:
        fitting = " or ".join(names)
        raise ValueError(
            f"{path} is a plan for the vocabulary treatment {fitting}, not {vocabulary}: ask for "
            f"{fitting}, or give another file"
        )
    return plan


def treatments_of(plan: Plan) -> list[str]:
    """Return the names of the treatments of the vocabulary that a checked plan may have."""
    return [name for name, own in TREATMENTS.items() if own.in_plan == plan.treatment]


def load_any_plan(path: Path) -> Plan:
    """Return the checked plan in a file, whatever its size and treatment.

    Raises:
        ValueError: if the file holds no plan, or one that cannot be run; the message names it.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise ValueError(f"cannot read the plan file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} holds no plan: it {error}; {_WAY_OUT}") from error
    try:
        plan = Plan.from_text(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        check(plan)
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be run: mend it, or save another with tools/simulate.py --save-plan: "
            f"{error}"
        ) from error
    return plan


def _counted(number: int, what: str) -> str:
    plural = "es" if what.endswith("h") else "s"
    return f"{number} {what}{plural if number != 1 else ''}"
