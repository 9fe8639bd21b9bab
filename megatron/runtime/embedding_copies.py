"""Which pipeline ranks hold a copy of the embedding's matrix, whose gradients must be summed."""

from megatron.schedules.plan import Plan


def ranks_with_copies(plan: Plan, *, tied: bool) -> tuple[int, ...]:
    """Return the pipeline ranks that hold the embedding's matrix, in ascending order.

    If the vocabulary is split, every rank has a shard of its own and there are no copies: the
    result is the rank of the first stage alone.

    Args:
        plan: tells which ranks hold the first and the last stage and the stage that looks ahead.
        tied: whether the output layer of the last stage has the embedding's matrix.
    """
    if plan.treatment.is_sharded:
        return (plan.stages[0][0],)
    holders = (*plan.readers, plan.stages[-1]) if tied else plan.readers
    return tuple(sorted({rank for rank, _ in holders}))
