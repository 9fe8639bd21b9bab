"""Any schedule as data: ``plan`` makes it, PyTorch's form takes it elsewhere and brings it back."""

from collections.abc import Mapping

from megatron.schedules.check import check
from megatron.schedules.costs import Time
from megatron.schedules.held import in_flight
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import plan_for
from megatron.schedules.plan import Plan
from megatron.schedules.request import DEFAULT_SECONDS, Request
from megatron.schedules.torch_csv import from_torch_csv, to_torch_csv, torchtitan_schedule
from megatron.simulator.costs.cost_file import named_costs
from megatron.simulator.simulate import Timeline
from megatron.simulator.simulate import simulate as _simulate

__all__ = [
    "Plan",
    "check",
    "from_torch_csv",
    "in_flight",
    "own_stages",
    "plan",
    "simulate",
    "to_torch_csv",
    "torchtitan_schedule",
]


def plan(
    schedule: str,
    ranks: int,
    microbatches: int,
    *,
    vocabulary: str = "none",
    chunks: int | None = None,
    memory_limit: float | None = None,
    split_backward: bool = False,
    costs: Mapping[str, Time] | None = None,
    seconds: float = DEFAULT_SECONDS,
) -> Plan:
    """Return the checked plan of a schedule: for every rank its passes in order.

    ``plan("v-half", ranks=4, microbatches=16)`` has all that a runtime needs to know: ``rows`` (the
    passes of every rank, as in ``F3`` and ``B3.1``), ``stages`` (the rank and chunk of every stage,
    in the order of the data), ``to_text()``, and the rest of ``Plan``. The same arguments make the
    same plan on every machine, ``optimal`` excepted.

    Args:
        schedule: ``1f1b``, ``interleaved``, ``zb-h1``, ``zb-v``, ``v-half``, ``zb-auto``, ``auto``
            or another name of the README's table.
        ranks: pipeline ranks p.
        microbatches: microbatches m of an iteration.
        vocabulary: what becomes of embedding and output layer: ``none`` (the first and the last
            stage have them), ``vocab-1``, ``vocab-2``, ``naive`` or ``interlaced``.
        chunks: model chunks of a rank, where the schedule can have several.
        memory_limit: the most microbatches that a rank may have in flight. ``zb-auto`` needs one;
            ``zb-v``, ``v-half`` and ``v-min`` use a larger one for a shorter plan.
        split_backward: make the weight gradients separate passes W, even if the schedule does not.
        costs: time of every kind of pass and communication, in any unit, as in ``{"F": 1, "B": 1,
            "W": 0.8, "p2p": 0.1}``: one number, or one for each rank, or for each chunk of each
            rank. They decide where passes are placed, never whether a plan is right.
        seconds: the most time that ``optimal`` may take.

    Raises:
        ValueError: if there is no such schedule, treatment or plan; the message says what to do.
    """
    return plan_for(
        Request(
            schedule,
            vocabulary,
            ranks,
            microbatches,
            named_costs(costs),
            chunks=chunks,
            memory_limit=memory_limit,
            split_backward=split_backward,
            seconds=seconds,
        )
    )


def own_stages(plan: Plan, rank: int) -> list[int]:
    """Return the numbers of the stages that a rank holds, chunk by chunk.

    Stages are numbered in the order of the data, so a V of 2 ranks has ``[0, 3]`` and ``[1, 2]``.
    """
    return [plan.stage_of[rank, chunk] for chunk in range(plan.chunks)]


def simulate(plan: Plan, costs: Mapping[str, Time] | None = None) -> Timeline:
    """Return when every pass and communication of a plan takes place.

    ``simulate(plan).end`` is the time of an iteration, ``.idle()`` the share of it in which a rank
    runs no pass, ``.spans`` have every pass with its start and end.

    Args:
        plan: a plan that ``check`` accepts, wherever it comes from.
        costs: as for the function ``plan``.
    """
    known = named_costs(costs)
    return _simulate(lower(plan, known), known)
