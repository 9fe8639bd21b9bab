"""AdamW by apex's ``FusedAdam``, where that package is installed.

The kernel of apex takes a list of tensors, and reads and writes gradient, master and both moments:
28 bytes a parameter. Clipping with the loss scale (8 bytes) and rounding to the weights (6 bytes)
are separate passes over memory, so a step moves up to 42 bytes. Our kernels that update at once
move 30.

The package is NVIDIA's, from its repository. PyPI's project ``apex`` is a different package.
"""

import inspect
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from megatron.kernels.reference.optimizer import divide, in_slices
from megatron.optimizer.adamw import moments_of
from megatron.optimizer.mixed_precision import Master, Step, groups_of
from megatron.optimizer.settings import OptimizerSettings

USED: Final = "params bias_correction betas eps adam_w_mode set_grad_none"
"""The arguments that ``FusedAdam`` gets; rates and steps are set in its groups."""

MOST_ELEMENTS: Final = 1 << 30
"""Limit of a tensor's elements: older versions of apex count them in 32 bits."""


class ApexAdamW:
    """AdamW for some masters by ``FusedAdam``; a ``Rule`` that keeps ``Moments``.

    This class makes the moments, so that checkpoints find them even before the first step.

    Args:
        masters: at least one, fp32, with fp32 gradients.
        config: the moments' decay.

    Raises:
        ValueError: ``FusedAdam`` cannot be used; see ``load_fused_adam``.
    """

    rounds = False

    def __init__(self, masters: Sequence[Master], config: OptimizerSettings) -> None:
        self._gradients = [master.gradient for master in masters]
        self._groups = groups_of(masters)
        self.kept = moments_of(masters, config)
        states: dict[Tensor, dict[str, Tensor]] = {}
        params: list[list[Tensor]] = []
        for group in self._groups:
            params.append([])
            for master in group.masters:
                tensors = [master.weight, master.gradient, *self.kept[master.name].values()]
                for weight, gradient, mean, square in in_slices(tensors, MOST_ELEMENTS):
                    weight.grad = gradient
                    params[-1].append(weight)
                    states[weight] = {"exp_avg": mean, "exp_avg_sq": square}
        self._optimizer = load_fused_adam()(
            params=[{"params": own} for own in params],
            bias_correction=True,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            adam_w_mode=True,
            set_grad_none=False,
        )
        self._optimizer.state.update(states)

    @torch.no_grad()
    def step(self, step: Step) -> None:
        """As in ``Rule``; the quotients stay in the gradients."""
        divide(self._gradients, step.divisors)
        owns = self._optimizer.param_groups
        for group, own in zip(self._groups, owns, strict=True):
            own["lr"] = group.lr(step.rates)
            own["weight_decay"] = group.weight_decay(step.rates)
            own["step"] = step.number - 1  # FusedAdam adds 1
        self._optimizer.step()
        assert {own["step"] for own in owns} == {step.number}, "FusedAdam counts steps elsewhere"


def load_fused_adam() -> Any:
    """Return the class ``apex.optimizers.FusedAdam``.

    Raises:
        ValueError: the class is not installed, belongs to another package, does not load, has other
            arguments, or was built without its kernels; the message gives the reason.
    """
    package = find_spec("apex")
    if package is None:
        raise ValueError("apex is not installed")
    # The package is searched, not imported: another package of this name may run any code.
    folders = package.submodule_search_locations
    if folders is None or PathFinder.find_spec("apex.optimizers", list(folders)) is None:
        raise ValueError(
            "the package apex that is installed is not NVIDIA's, but another project of this name, "
            "such as PyPI's: it has no apex.optimizers"
        )
    try:
        found = import_module("apex.optimizers").FusedAdam
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ValueError(f"apex.optimizers.FusedAdam does not load here ({error})") from error
    known = inspect.signature(found).parameters
    if lacks := [argument for argument in USED.split() if argument not in known]:
        raise ValueError(f"apex.optimizers.FusedAdam has no {', '.join(lacks)}")
    try:
        kernels = import_module("amp_C")
    except (ImportError, OSError) as error:
        raise ValueError(f"apex was built without its CUDA extensions ({error})") from error
    if not hasattr(kernels, "multi_tensor_adam"):
        raise ValueError("apex was built without multi_tensor_adam in its CUDA extensions")
    return found
