"""Gradient descent with momentum, by PyTorch's kernel, as in Megatron.

The weight decay is not decoupled: it is added to the gradient, so the momentum contains it too.
The momentum is a sum, not a mean: v <- momentum v + (g + decay w), w <- w - lr v.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megatron.kernels.reference.optimizer import last_divisor
from megatron.optimizer.mixed_precision import Master, Step, groups_of
from megatron.optimizer.settings import OptimizerSettings


class SGD:
    """SGD for some masters; a ``Rule`` that keeps ``momentum_buffer`` if there is momentum.

    Args:
        masters: at least one.
        config: the momentum; 0 switches it off.
    """

    rounds = False

    def __init__(self, masters: Sequence[Master], config: OptimizerSettings) -> None:
        self._momentum = config.sgd_momentum
        self._gradients = [master.gradient for master in masters]
        self._groups = groups_of(masters)
        self.kept: dict[str, dict[str, Tensor]] = {}
        if config.sgd_momentum:
            self.kept = {
                master.name: {"momentum_buffer": torch.zeros_like(master.weight.detach())}
                for master in masters
            }

    @torch.no_grad()
    def step(self, step: Step) -> None:
        """As in ``Rule``; one call of the fused kernel for each group."""
        divisor = last_divisor(self._gradients, step.divisors)
        for group in self._groups:
            sgd(
                group.weights,
                group.gradients,
                [
                    self.kept[master.name]["momentum_buffer"] if self.kept else None
                    for master in group.masters
                ],
                fused=True,
                grad_scale=divisor,
                weight_decay=group.weight_decay(step.rates),
                momentum=self._momentum,
                lr=group.lr(step.rates),
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
