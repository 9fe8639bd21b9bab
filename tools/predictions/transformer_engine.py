"""The differences between this project's kernels and those of Megatron-LM with Transformer Engine.

Named differences, as in ``megatron_lm.py``: each changes which kernels a pass launches, and none is
a share of a time. They hold for NeMo and Megatron-Bridge from 2024 on.

* Collectives of tensor ranks run beside products (``--tp-comm-overlap``): a gathering beside the
  product that follows, a scattering beside the product before it.
* A scale of 8 bits is made beside the kernels that need it. With scales of earlier iterations, or
  of 32 numbers, the largest value is not looked for in a pass of its own.
* Products in 8 bits add gradients of weights to their sums themselves.
* Experts multiply in 8 bits as fast as linear layers do.
* Gate, activation and weights of experts are one kernel.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from megatron.simulator.costs.count import AWAIT, Begin, Collective, Launch, Step, Work

_OF_SCALES: Final = frozenset({"zeros", "clamp", "reciprocal", "mul", "div"})
_NUMBERS: Final = 10_000
"""Bytes below which a kernel with such a name works on scales."""

_LOOKS: Final = frozenset({"quantise", "quantise_groups"})
"""Our kernels that look for the largest value, and then, launched again, round."""

_ELEMENTWISE: Final = frozenset(
    {"clamp", "mul", "mul_", "sigmoid", "add", "_to_copy", "sum", "rsub", "gt", "masked_fill_"}
    | {"abs"}
)
_CHAIN: Final = 5
"""Elementwise kernels in a row from which on they are one kernel's work."""


def as_transformer_engine(work: Work, *, looks: bool) -> Work:
    """Return a pass as Megatron-LM launches it.

    Args:
        work: of this project.
        looks: whether the largest value of a tensor is looked for in a pass of its own, which
            scales of the same iteration need.
    """
    launches = _joined(_without_scales(work.steps, looks=looks))
    return Work(tuple(_beside_products(list(launches))), work.left, work.peak)


def _without_scales(steps: Sequence[Step], *, looks: bool) -> Iterator[Step]:
    """Yield the steps without kernels for scales and sums that larger kernels do as well."""
    before, looked = "", False
    for step in steps:
        if not isinstance(step, Launch):
            yield step
            continue
        name = step.name
        if name == "clone" or (name in _OF_SCALES and step.bytes < _NUMBERS):
            continue
        if name == "add_" and "eight_bit" in before:
            before = ""
            continue
        if name in _LOOKS:
            looked = not looked
            if looked and not looks:
                continue
        before = name
        if "grouped_eight_bit" in name:
            step = step._replace(name="eight_bit_product", quickness="8 bits")
        yield step


def _joined(steps: Iterator[Step]) -> Iterator[Step]:
    """Yield the steps with every long row of elementwise kernels as one, which moves the most."""
    for elementwise, row in groupby(steps, _is_elementwise):
        own = list(row)
        if not elementwise or len(own) < _CHAIN:
            yield from own
            continue
        launches = (step for step in own if isinstance(step, Launch))
        yield max(launches, key=lambda launch: launch.bytes)._replace(name="gated")


def _is_elementwise(step: Step) -> bool:
    return isinstance(step, Launch) and step.name in _ELEMENTWISE


def _beside_products(steps: Sequence[Step]) -> list[Step]:
    """Return the steps with the collectives of tensor ranks beside products."""
    found: list[Step] = []
    entering: list[Collective] = []
    for step in steps:
        if isinstance(step, Collective) and step.axis == "tensor" and step.kind == "all_gather":
            entering.append(step)
        elif isinstance(step, Collective) and step.axis == "tensor":
            _beside_last(found, step)
        elif _multiplies(step) and entering:
            found += [Begin(tuple(entering)), step, AWAIT]
            entering = []
        else:
            found.append(step)
    return [*found, *entering]


def _beside_last(found: list[Step], leaving: Collective) -> None:
    """Put a collective beside the last product of ``found``; without a product it stays alone."""
    for place in range(len(found) - 1, -1, -1):
        if _multiplies(found[place]):
            before = found[place - 1] if place else None
            if isinstance(before, Begin):
                found[place - 1] = Begin((*before.collectives, leaving))
            else:
                found[place : place + 1] = [Begin((leaving,)), found[place], AWAIT]
            return
    found.append(leaving)


def _multiplies(step: Step) -> bool:
    return isinstance(step, Launch) and step.product is not None
