"""Adam with decoupled weight decay (arXiv 1711.05101), by PyTorch's kernels or a device's own.

The moments are kept in bf16 if the configuration asks for it. With ``adam_beta2`` 0.999 a step
changes the second moment by a thousandth of itself, which is less than bf16 can represent. The
second moment then rises when gradients grow, and hardly falls when they shrink. So bf16 needs a
smaller beta.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.kernels.adamw import AdamWStep, AdamWTensors
from megatron.kernels.face import Kernels
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.mixed_precision import Master, Step
from megatron.optimizer.settings import MomentType, OptimizerSettings

Moments = dict[str, dict[str, Tensor]]
"""``exp_avg`` and ``exp_avg_sq``, the first and second moment, by the name of the master."""


def moments_of(masters: Sequence[Master], config: OptimizerSettings) -> Moments:
    """Return moments of zero, in the types that the configuration asks for."""

    def zeros(master: Master, kind: MomentType) -> Tensor:
        weight = master.weight.detach()
        return torch.zeros_like(weight, dtype=torch.bfloat16 if kind == "bf16" else weight.dtype)

    return {
        master.name: {
            "exp_avg": zeros(master, config.exp_avg_dtype),
            "exp_avg_sq": zeros(master, config.exp_avg_sq_dtype),
        }
        for master in masters
    }


def keeps_16_bits(masters: Sequence[Master], config: OptimizerSettings) -> bool:
    """Return whether moments or main gradients are narrower than the masters."""
    narrow_moments = "bf16" in (config.exp_avg_dtype, config.exp_avg_sq_dtype)
    return narrow_moments or masters[0].gradient.dtype != masters[0].weight.dtype


class AdamW:
    """AdamW for some masters by kernels; a ``Rule`` that keeps ``Moments``.

    Kernels that update at once read and write every tensor once, and also round the masters. They
    read the gradient, the master and both moments, and write the master, the moments and the
    weight: 30 bytes a parameter with fp32 moments and 16-bit weights.

    Args:
        masters: at least one, with gradients of zero.
        config: the moments and their types.
        kernels: of the masters' device.

    Attributes:
        rounds: as in ``Rule``.
        kept: as in ``Rule``.
    """

    def __init__(
        self, masters: Sequence[Master], config: OptimizerSettings, kernels: Kernels
    ) -> None:
        self._config, self._kernels = config, kernels
        self.rounds = kernels.updates_at_once
        self.kept = moments_of(masters, config)
        rounded = (master for master in masters if master.part.weight.dtype != master.weight.dtype)
        self._tensors = AdamWTensors(
            gradients=[master.gradient for master in masters],
            masters=[master.weight.detach() for master in masters],
            moments=[own["exp_avg"] for own in self.kept.values()],
            squares=[own["exp_avg_sq"] for own in self.kept.values()],
            weights=[master.part.weight for master in rounded] if self.rounds else [],
            decays=[master.decays for master in masters],
            in_vocabulary=[master.in_vocabulary for master in masters],
        )
        if kernels.updates_at_once:
            self._change_nothing()

    def _change_nothing(self) -> None:
        """Take a step too short to change a weight, so that the kernels are compiled.

        Gradients and moments are zero before the step, and stay zero.
        """
        still = Rates(lr=1e-30, vocabulary_lr=1e-30, weight_decay=self._config.weight_decay)
        # With an epsilon of 0 the quotient of these moments would be 0 / 0.
        numbers = replace(self._numbers(Step(still, (math.inf,), 1)), epsilon=1.0)
        for keeps in {False, self._config.post_validation}:
            self._kernels.adamw_(self._tensors, replace(numbers, keeps_quotients=keeps))

    def step(self, step: Step) -> None:
        """As in ``Rule``."""
        self._kernels.adamw_(self._tensors, self._numbers(step))

    def _numbers(self, step: Step) -> AdamWStep:
        """Return the numbers of a step.

        The divided gradients replace the gradients if the kernels divide in place, or if the step
        may be undone and taken again.
        """
        config, rates = self._config, step.rates
        divides_in_place = not self._kernels.updates_at_once
        return AdamWStep(
            divisors=step.divisors,
            keeps_quotients=divides_in_place or (config.post_validation and bool(step.divisors)),
            lr=rates.lr,
            vocabulary_lr=rates.vocabulary_lr,
            weight_decay=rates.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            epsilon=config.adam_eps,
            number=step.number,
        )
