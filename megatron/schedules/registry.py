"""Names of schedules and vocabulary treatments, as the command line spells them."""

from collections.abc import Callable, Mapping
from typing import Final

from megatron.schedules.block import Block, unroll
from megatron.schedules.check import check
from megatron.schedules.one_f_one_b import one_f_one_b
from megatron.schedules.passes import Pass
from megatron.schedules.plan import VOCABULARY_BARRIERS, Plan
from megatron.schedules.tighten import tighten
from megatron.schedules.timing import unit_cost
from megatron.schedules.vocabulary import with_vocabulary

SCHEDULES: Final[Mapping[str, Callable[[int], Block]]] = {"1f1b": one_f_one_b}
VOCABULARY_TREATMENTS: Final[tuple[str, ...]] = tuple(VOCABULARY_BARRIERS)


def make_plan(
    schedule: str,
    vocabulary: str,
    ranks: int,
    microbatches: int,
    cost: Callable[[int, Pass], float] = unit_cost,
) -> Plan:
    """Return the checked plan of a schedule with a treatment of the vocabulary.

    Args:
        schedule: a name of ``SCHEDULES``.
        vocabulary: a name of ``VOCABULARY_TREATMENTS``.
        ranks: pipeline ranks p.
        microbatches: microbatches m of an iteration.
        cost: assumed duration of a pass on a rank, the better for being true: passes are placed
            by it.

    Raises:
        ValueError: for an unknown name, or a count below 1.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule '{schedule}': choose one of {', '.join(SCHEDULES)}")
    if vocabulary not in VOCABULARY_BARRIERS:
        raise ValueError(
            f"unknown vocabulary treatment '{vocabulary}': choose one of "
            f"{', '.join(VOCABULARY_TREATMENTS)}"
        )
    if ranks < 1:
        raise ValueError(f"a pipeline needs at least 1 rank, got {ranks}")
    block = SCHEDULES[schedule](ranks)
    barriers = VOCABULARY_BARRIERS[vocabulary]
    plan = unroll(block if barriers is None else with_vocabulary(block, barriers), microbatches)
    check(plan)
    plan = tighten(plan, cost)
    check(plan)
    return plan
