"""AdamW where the kernels read and write every tensor once, rounding and scaling included.

Read are gradient, master and both moments, written master, moments and weight: 30 bytes a parameter
with fp32 moments and weights of 16 bits. Moments and main gradients may have 16 bits too.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.kernels.adamw import AdamWStep, AdamWTensors
from megatron.kernels.face import Kernels
from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.mixed_precision import Master, Step
from megatron.optimizer.narrow_adamw import moment_dtype


class OnePassAdamW:
    """AdamW for some masters; a ``Rule`` that keeps the moments ``exp_avg`` and ``exp_avg_sq``.

    Args:
        masters: at least one, with gradients of zero.
        config: the moments and their types.
        kernels: of the masters' device.
    """

    rounds = True

    def __init__(
        self, masters: Sequence[Master], config: OptimizerConfig, kernels: Kernels
    ) -> None:
        self._config, self._kernels = config, kernels
        self._names = [master.name for master in masters]
        weights = [master.weight.detach() for master in masters]
        self._tensors = AdamWTensors(
            gradients=[master.gradient for master in masters],
            masters=weights,
            moments=_zeros(weights, moment_dtype(config.exp_avg_dtype, weights[0].dtype)),
            squares=_zeros(weights, moment_dtype(config.exp_avg_sq_dtype, weights[0].dtype)),
            weights=[
                master.part.weight
                for master in masters
                if master.part.weight.dtype != master.weight.dtype
            ],
            decays=[master.part.weight_decay for master in masters],
            in_vocabulary=[master.in_vocabulary for master in masters],
        )
        self._change_nothing()

    def _change_nothing(self) -> None:
        """Take a step too short to change a weight, so that the first one finds its program ready.

        No gradient has been formed yet, and all stay zero.
        """
        config, rate = self._config, 1e-30
        nothing = AdamWStep(
            divisors=(float("inf"),),
            keeps_quotients=False,
            lr=rate,
            vocabulary_lr=rate,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            epsilon=1.0,
            number=1,
        )
        for keeps in {False, config.post_validation}:
            self._kernels.adamw_(self._tensors, replace(nothing, keeps_quotients=keeps))

    def step(self, step: Step) -> None:
        """As in ``Rule``; only a step that may be taken again leaves the gradients scaled."""
        config, rates = self._config, step.rates
        numbers = AdamWStep(
            divisors=step.divisors,
            keeps_quotients=config.post_validation and bool(step.divisors),
            lr=rates.lr,
            vocabulary_lr=rates.vocabulary_lr,
            weight_decay=rates.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            epsilon=config.adam_eps,
            number=step.number,
        )
        self._kernels.adamw_(self._tensors, numbers)

    def state_of(self, name: str) -> dict[str, Tensor]:
        """As in ``Rule``; the moments in their types, in which checkpoints keep them."""
        if name not in self._names:
            return {}
        index = self._names.index(name)
        moments, squares = self._tensors.moments, self._tensors.squares
        return {"exp_avg": moments[index], "exp_avg_sq": squares[index]}

    def loaded(self, steps: int) -> None:
        """As in ``Rule``: a step is told its number."""

    @property
    def state(self) -> list[Tensor]:
        """As in ``Rule``."""
        return [*self._tensors.moments, *self._tensors.squares]


def _zeros(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros_like(weight, dtype=dtype) for weight in weights]
