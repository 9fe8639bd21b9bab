"""Insert R, the pass that computes a chunk again for its backward, into any plan.

Where layers are computed again within B, that begins when the gradient has arrived. As a pass of
its own it needs nothing but its F. So a rank that waits for a gradient can do it meanwhile, and
the ranks that wait for its B get their gradient earlier.
"""

from dataclasses import replace

from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan


def with_recomputation(plan: Plan) -> Plan:
    """Return ``plan`` with R directly before every B; one that has R passes stays as it is.

    No pass ends later than in ``plan``, where B takes the time of both.
    """
    if plan.recomputes:
        return plan
    return replace(plan, rows=tuple(map(_inserted, plan.rows)))


def _inserted(row: tuple[Pass, ...]) -> tuple[Pass, ...]:
    return tuple(
        part
        for item in row
        for part in ((item._replace(kind="R"), item) if item.kind == "B" else (item,))
    )
