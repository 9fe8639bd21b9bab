"""Gradient descent with momentum, as Megatron has it: PyTorch's own.

The weight decay is not decoupled: it is added to the gradient, and so goes into the momentum too.
The momentum is a sum, not a mean: v <- momentum v + (g + decay w), w <- w - lr v.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.groups import groups_of, set_rates
from megatron.optimizer.mixed_precision import Master, Step, last_divisor


class _FusedSGD(torch.optim.SGD):
    """Declares what PyTorch only reads: the scale that the fused kernel divides gradients by."""

    grad_scale: Tensor | None


class SGD:
    """Momentum SGD for some masters; a ``Rule`` that keeps ``momentum_buffer``, if there is one.

    Args:
        masters: at least one.
        config: the momentum; 0: none.
    """

    rounds = False

    def __init__(self, masters: Sequence[Master], config: OptimizerConfig) -> None:
        self._gradients = [master.gradient for master in masters]
        self._sgd = _FusedSGD(
            groups_of(masters), lr=config.lr, momentum=config.sgd_momentum, fused=True
        )
        self._momenta: dict[str, Tensor] = {}
        if config.sgd_momentum:
            for master in masters:
                momentum = torch.zeros_like(master.weight, requires_grad=False)
                self._momenta[master.name] = momentum
                self._sgd.state[master.weight]["momentum_buffer"] = momentum

    def step(self, step: Step) -> None:
        """As in ``Rule``; one pass of the fused kernel."""
        self._sgd.grad_scale = last_divisor(self._gradients, step)
        set_rates(self._sgd, step.rates)
        self._sgd.step()

    def state_of(self, name: str) -> dict[str, Tensor]:
        """As in ``Rule``."""
        return {"momentum_buffer": self._momenta[name]} if name in self._momenta else {}

    def loaded(self, steps: int) -> None:
        """As in ``Rule``: no step depends on how many there were before."""

    @property
    def state(self) -> list[Tensor]:
        """As in ``Rule``."""
        return list(self._momenta.values())
