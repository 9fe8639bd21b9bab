"""The order in which a row of one microbatch is counted."""

from collections.abc import Iterator, Sequence
from typing import TypeGuard

from megatron.schedules.lower import Instruction, Run, Wait


def waits_before_readers(row: Sequence[Instruction]) -> Iterator[Instruction]:
    """Yield a row whose waits for gradients of embeddings come right before the IB of their unit.

    The rank that broadcasts such a gradient has it already, so its IB need not come after its wait.
    The later of the two frees the gradient. In this order IB always frees the gradient. Where IB
    comes first in the row of a plan, ``rank_memory.held`` lets the wait free the gradient instead.
    """
    waits = {(step.comm.microbatch, step.comm.slice): step for step in row if _is_moved(step)}
    for step in row:
        if isinstance(step, Run) and step.item.kind == "IB":
            wait = waits.get((step.item.microbatch, step.item.slice))
            if wait is not None:
                yield wait
        if not _is_moved(step):
            yield step


def _is_moved(step: Instruction) -> TypeGuard[Wait]:
    return isinstance(step, Wait) and step.comm.kind == "CIB"
