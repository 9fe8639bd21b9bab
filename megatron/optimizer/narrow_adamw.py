"""AdamW whose moments, or main gradients, are kept in 16 bits.

A step widens them to fp32, updates them with PyTorch's fused kernel, and rounds them back. Some
elements are taken at a time, so that the wide copies need little memory. The second moment changes
by a thousandth of itself in a step (``adam_beta2`` 0.999), less than bf16 resolves: it follows
gradients that grow, and hardly falls again where they shrink. So bf16 wants a smaller beta.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from megatron.optimizer.adamw import Operands, fused_adamw
from megatron.optimizer.config import MomentType, OptimizerConfig
from megatron.optimizer.groups import Group, groups_of
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.mixed_precision import Master, Step, last_divisor

ELEMENTS_AT_ONCE: Final = 1 << 22
"""Elements of a master that are wide at the same time: 16 MiB for each of three."""

_TYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


def moment_dtype(name: MomentType, master: torch.dtype) -> torch.dtype:
    """Return the type of a moment; fp32 stands for that of the masters."""
    return master if name == "fp32" else _TYPES[name]


class NarrowAdamW:
    """AdamW for some masters; a ``Rule`` that keeps the moments ``exp_avg`` and ``exp_avg_sq``.

    Args:
        masters: at least one.
        config: the moments and their types.
    """

    rounds = False

    def __init__(self, masters: Sequence[Master], config: OptimizerConfig) -> None:
        self._masters = masters
        self._groups = groups_of(masters)
        self._config = config
        self._step = torch.zeros((), device=masters[0].weight.device)
        self._moments = {master.name: _moments_of(master, config) for master in masters}

    def step(self, step: Step) -> None:
        """As in ``Rule``."""
        gradients = [master.gradient for master in self._masters]
        divisor = last_divisor(gradients, step)
        if divisor is not None:
            torch._foreach_div_(gradients, divisor)
        before = self._step.clone()
        for group in self._groups:
            for master in group.masters:
                tensors = [master.weight, master.gradient, *self._kept(master)]
                for slices in in_slices(tensors, ELEMENTS_AT_ONCE):
                    self._step.copy_(before)  # the kernel counts on, once a slice
                    self._update(slices, group, step.rates)

    def _update(self, slices: Sequence[Tensor], group: Group, rates: Rates) -> None:
        """Update a slice of a master of a group, and of its moments."""
        weight, gradient, *moments = slices
        wide = [moment.to(weight.dtype) for moment in moments]  # itself, if it is wide
        operands = Operands(
            [weight], [gradient.to(weight.dtype)], [wide[0]], [wide[1]], [self._step]
        )
        fused_adamw(operands, group, rates, self._config)
        for moment, updated in zip(moments, wide, strict=True):
            if moment is not updated:
                moment.copy_(updated)

    def _kept(self, master: Master) -> list[Tensor]:
        return list(self._moments[master.name].values())

    def state_of(self, name: str) -> dict[str, Tensor]:
        """As in ``Rule``; the moments in their types, in which checkpoints keep them."""
        return dict(self._moments.get(name, {}))

    def loaded(self, steps: int) -> None:
        """As in ``Rule``."""
        self._step.fill_(steps)

    @property
    def state(self) -> list[Tensor]:
        """As in ``Rule``."""
        return [self._step, *(kept for master in self._masters for kept in self._kept(master))]


def _moments_of(master: Master, config: OptimizerConfig) -> dict[str, Tensor]:
    weight = master.weight.detach()
    types = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
    return {
        name: torch.zeros_like(weight, dtype=moment_dtype(kind, weight.dtype))
        for name, kind in types.items()
    }


def in_slices(tensors: Sequence[Tensor], elements: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors of one shape some elements at a time, the same of each, as flat views."""
    flat = (tensor.detach().view(-1).split(elements) for tensor in tensors)
    return zip(*flat, strict=True)
