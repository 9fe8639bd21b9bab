"""Schedules as data: ``plan`` makes a plan; other functions write and read it in PyTorch's form."""

from collections.abc import Mapping
from typing import Any

from megatron.schedules.block_options import BlockOptions
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
    **options: Any,
) -> Plan:
    """Return the checked plan of a schedule: for every rank its passes in order.

    ``plan("v-half", ranks=4, microbatches=16)`` has all that a runtime needs to know. ``rows`` are
    the passes of every rank, such as ``F3`` and ``B3.1`` (microbatch 3, chunk 1). ``stages`` are
    the rank and chunk of every stage, in the order in which data flows. ``to_text()`` writes the
    plan as text; see ``Plan`` for the rest. The same arguments make the same plan on every machine,
    except with the schedule ``optimal``.

    Args:
        schedule: ``1f1b``, ``interleaved``, ``zb-h1``, ``zb-v``, ``v-half``, ``zb-auto``, ``auto``
            or another name of the table in docs/schedules.md.
        ranks: pipeline ranks p.
        microbatches: microbatches m of an iteration.
        vocabulary: treatment of the embedding and the output layer: ``none`` (the first and the
            last stage have them), ``vocab-1``, ``vocab-2``, ``naive`` or ``interlaced``.
        chunks: model chunks of a rank, for a schedule that can have several.
        memory_limit: the most microbatches that a rank may have in flight. ``zb-auto`` needs a
            limit. ``zb-v``, ``v-half`` and ``v-min`` use a larger limit for a shorter plan.
        split_backward: make the weight gradients separate passes W, even if the schedule does not.
        costs: time of every kind of pass and communication, in any unit, as in ``{"F": 1, "B": 1,
            "W": 0.8, "p2p": 0.1}``. A time is one number, or a number for each rank, or for each
            chunk of each rank. Costs decide where passes are placed. A plan is right with any
            costs.
        seconds: the most time that ``optimal`` may take.
        options: options that only some schedules take, by their short names in docs/running.md, as
            ``group=8`` for ``interleaved``.

    Raises:
        TypeError: if no option has one of these names.
        ValueError: if there is no such schedule, treatment or plan. The message names the way out.
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
            options=BlockOptions.of(**options),
        )
    )


def own_stages(plan: Plan, rank: int) -> list[int]:
    """Return the numbers of the stages that a rank holds, chunk by chunk.

    Stages are numbered in the order in which data flows. So the two ranks of a V-shaped schedule
    hold ``[0, 3]`` and ``[1, 2]``.
    """
    return [plan.stage_of[rank, chunk] for chunk in range(plan.chunks)]


def simulate(plan: Plan, costs: Mapping[str, Time] | None = None) -> Timeline:
    """Return the times at which the passes and communications of a plan take place.

    ``simulate(plan).end`` is the time of an iteration. ``.idle()`` is the share of this time in
    which ranks run no pass. ``.spans`` are the passes with their starts and ends.

    Args:
        plan: any plan that ``check`` accepts.
        costs: as for the function ``plan``.
    """
    known = named_costs(costs)
    return _simulate(lower(plan, known), known)
