"""Adam with decoupled weight decay (arXiv 1711.05101), by PyTorch or by this project's kernels.

Both rules keep the moments in 16 bits if they are asked to. The second moment changes by a
thousandth of itself in a step (``adam_beta2`` 0.999), less than bf16 resolves: it follows gradients
that grow, and hardly falls again where they shrink. So bf16 wants a smaller beta.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron.kernels.adamw import AdamWStep, AdamWTensors
from megatron.kernels.face import Kernels
from megatron.optimizer.config import MomentType, OptimizerConfig
from megatron.optimizer.mixed_precision import Group, Master, Step, divide, groups_of, last_divisor

ELEMENTS_AT_ONCE: Final = 1 << 22
"""Elements of a master that are wide at the same time: 16 MiB for each of three."""

Moments = Mapping[str, Mapping[str, Tensor]]
"""``exp_avg`` and ``exp_avg_sq`` of every master, by its name."""


def moments_of(masters: Sequence[Master], config: OptimizerConfig) -> dict[str, dict[str, Tensor]]:
    """Return ``Moments`` of zero, in the types that the configuration asks for."""

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


def keeps_16_bits(masters: Sequence[Master], config: OptimizerConfig) -> bool:
    """Return whether moments or main gradients are narrower than the masters."""
    narrow_moments = "bf16" in (config.exp_avg_dtype, config.exp_avg_sq_dtype)
    return narrow_moments or masters[0].gradient.dtype != masters[0].weight.dtype


class AdamW:
    """AdamW for some masters by PyTorch's fused kernel; a ``Rule`` that keeps ``Moments``.

    The kernel makes one pass over master, gradient and both moments, with gradient clipping folded
    into it. On one CPU core (17 GB/s) a step takes 160 ms per 100M bf16 parameters, of which
    rounding takes 45 ms. Slices that stay in cache were no faster, since the kernel already runs at
    the speed of memory. What has 16 bits is widened to fp32 and rounded back, some elements at a
    time, so that the wide copies need little memory.

    Args:
        masters: at least one.
        config: moments.
    """

    rounds = False

    def __init__(self, masters: Sequence[Master], config: OptimizerConfig) -> None:
        self._config = config
        self._gradients = [master.gradient for master in masters]
        self._groups = groups_of(masters)
        self._is_narrow = keeps_16_bits(masters, config)
        self.kept = moments_of(masters, config)

    @torch.no_grad()
    def step(self, step: Step) -> None:
        """As in ``Rule``."""
        if self._is_narrow:
            divide(self._gradients, step.divisors)
            for group in self._groups:
                for master in group.masters:
                    self._update_narrow(master, group, step)
            return
        divisor = last_divisor(self._gradients, step)
        for group in self._groups:
            kept = [self.kept[master.name] for master in group.masters]
            moments = [own["exp_avg"] for own in kept], [own["exp_avg_sq"] for own in kept]
            self._update((group.weights, group.gradients, *moments), group, step, divisor)

    def _update_narrow(self, master: Master, group: Group, step: Step) -> None:
        tensors = [master.weight, master.gradient, *self.kept[master.name].values()]
        for slices in in_slices(tensors, ELEMENTS_AT_ONCE):
            wide = [each.to(master.weight.dtype) for each in slices]  # itself, if it is wide
            self._update([[each] for each in wide], group, step)
            for moment, updated in zip(slices[2:], wide[2:], strict=True):
                if moment is not updated:
                    moment.copy_(updated)

    def _update(
        self,
        operands: Sequence[list[Tensor]],
        group: Group,
        step: Step,
        divisor: Tensor | None = None,
    ) -> None:
        """Update weights of a group by PyTorch's kernel.

        It is PyTorch's function: the class imports the compiler, a second at every start.

        Args:
            operands: weights, their gradients, first and second moments, all of one type.
            group: whose rates hold for them.
            step: the step.
            divisor: by which gradients are divided in the same pass.
        """
        weights, gradients, means, squares = operands
        before = torch.full((len(weights),), step.number - 1.0, device=weights[0].device)
        adamw(
            weights,
            gradients,
            means,
            squares,
            [],
            list(before.unbind()),  # the kernel counts on
            fused=True,
            grad_scale=divisor,
            amsgrad=False,
            maximize=False,
            beta1=self._config.adam_beta1,
            beta2=self._config.adam_beta2,
            eps=self._config.adam_eps,
            lr=group.lr(step.rates),
            weight_decay=group.weight_decay(step.rates),
        )


def in_slices(tensors: Sequence[Tensor], elements: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors of one shape some elements at a time, the same of each, as flat views."""
    flat = (tensor.detach().view(-1).split(elements) for tensor in tensors)
    return zip(*flat, strict=True)


class OnePassAdamW:
    """AdamW for some masters by kernels that round and scale; a ``Rule`` that keeps ``Moments``.

    The kernels read and write every tensor once. Read are gradient, master and both moments,
    written master, moments and weight: 30 bytes a parameter with fp32 moments and weights of 16
    bits.

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
        self.kept = moments_of(masters, config)
        self._tensors = AdamWTensors(
            gradients=[master.gradient for master in masters],
            masters=[master.weight.detach() for master in masters],
            moments=[own["exp_avg"] for own in self.kept.values()],
            squares=[own["exp_avg_sq"] for own in self.kept.values()],
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
