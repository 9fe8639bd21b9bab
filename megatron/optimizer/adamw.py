"""Adam with decoupled weight decay (arXiv 1711.05101).

The update is PyTorch's fused kernel: one pass over master, gradient and both moments, with gradient
clipping folded into it. On one CPU core (17 GB/s) a step takes 160 ms per 100M bf16 parameters, of
which rounding takes 45 ms. Slices that stay in cache were no faster, since the kernel already runs
at the speed of memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.groups import groups_of, set_rates
from megatron.optimizer.mixed_precision import Master, Step, last_divisor


class _FusedAdamW(torch.optim.AdamW):
    """Declares what PyTorch only reads: the scale that the fused kernel divides gradients by."""

    grad_scale: Tensor | None


class AdamW:
    """AdamW for some masters; a ``Rule`` that keeps the moments ``exp_avg`` and ``exp_avg_sq``.

    Args:
        masters: at least one.
        config: moments.
    """

    rounds = False

    def __init__(self, masters: Sequence[Master], config: OptimizerConfig) -> None:
        self._gradients = [master.gradient for master in masters]
        self._adam = _FusedAdamW(
            groups_of(masters),
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        for master in masters:
            weight = master.weight
            self._adam.state[weight] = {
                "step": torch.zeros((), device=weight.device),
                "exp_avg": torch.zeros_like(weight, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
            }
        self._by_name = {master.name: self._adam.state[master.weight] for master in masters}

    def step(self, step: Step) -> None:
        """As in ``Rule``; one pass of the fused kernel."""
        self._adam.grad_scale = last_divisor(self._gradients, step)
        set_rates(self._adam, step.rates)
        self._adam.step()

    def state_of(self, name: str) -> dict[str, Tensor]:
        """As in ``Rule``."""
        own = self._by_name.get(name)
        return {} if own is None else {kind: own[kind] for kind in ("exp_avg", "exp_avg_sq")}

    def loaded(self, steps: int) -> None:
        """As in ``Rule``."""
        for own in self._by_name.values():
            own["step"].fill_(steps)

    @property
    def state(self) -> list[Tensor]:
        """As in ``Rule``."""
        return [tensor for own in self._by_name.values() for tensor in own.values()]
