"""Works that a pass does one after the other, in which one begins collectives for the next."""

from collections.abc import Sequence
from itertools import takewhile

from megatron.simulator.costs.count import Await, Begin, Launch, Step, Work


def in_a_row(works: Sequence[Work]) -> Work:
    """Return the steps of works that a pass does one after the other.

    A W begins with gatherings for its first products. If the W of another layer comes before, they
    are under way during the last products of that W: each begins before one of these products
    (``megatron.layers.weight_gradients.parts_of``).
    """
    steps: list[Step] = []
    for work in works:
        begins = leading_begins(work.steps)
        steps = _beside_last_products(steps, begins)
        steps += work.steps[len(begins) :]
    return Work(tuple(steps))


def leading_begins(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the communications that begin before all else."""
    return tuple(takewhile(lambda step: isinstance(step, Begin), steps))


def _beside_last_products(steps: list[Step], begins: Sequence[Step]) -> list[Step]:
    """Return ``steps`` with further communications, each before one of the last products."""
    products = [at for at, step in enumerate(steps) if isinstance(step, Launch) and step.flops]
    if not begins or len(products) < len(begins):
        return [*steps, *begins]
    places = dict(zip(products[-len(begins) :], begins, strict=True))
    found: list[Step] = []
    begun = 0
    for at, step in enumerate(steps):
        if at in places:
            found.append(places[at])
            begun += 1
        found.append(Await(step.later + begun) if isinstance(step, Await) else step)
    return found
