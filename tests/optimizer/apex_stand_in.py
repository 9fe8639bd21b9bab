"""A stand-in for the package apex: the published signature of ``FusedAdam``, in plain PyTorch.

It demands what apex's kernels do of tensors: one type in all four lists, and dense memory. The
package is put on the path as files, because that is how it is looked for.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import invalidate_caches
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

PUBLISHED: Mapping[str, Any] = MappingProxyType(
    {
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "adam_w_mode": True,
        "weight_decay": 0.0,
        "amsgrad": False,
        "set_grad_none": True,
    }
)
"""The arguments after ``params`` that all versions have, with their defaults."""


class FusedAdam(torch.optim.Optimizer):
    """The signature of a version of 2025; an older one ends at ``set_grad_none``."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        assert not any((amsgrad, capturable, master_weights)), "not asked for here"
        rates = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**rates, "bias_correction": bias_correction})
        self.adam_w_mode, self.set_grad_none = adam_w_mode, set_grad_none

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # overloaded there
        """Count on in every group, make moments that are not there, and update."""
        assert closure is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)
        return None

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state.update(exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        gradient, moment, square = weight.grad, state["exp_avg"], state["exp_avg_sq"]
        assert gradient is not None
        assert {t.dtype for t in (weight, gradient, moment, square)} == {torch.float32}
        assert all(t.is_contiguous() for t in (weight, gradient, moment, square))
        beta1, beta2 = group["betas"]
        moment.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first = 1 - beta1 ** group["step"] if group["bias_correction"] else 1.0
        second = 1 - beta2 ** group["step"] if group["bias_correction"] else 1.0
        update = (moment / first) / ((square / second).sqrt() + group["eps"])
        assert self.adam_w_mode, "decay would be added to the gradient"
        weight.sub_(update.add_(weight, alpha=group["weight_decay"]), alpha=group["lr"])


class WithoutMode(torch.optim.Optimizer):
    """A version whose ``FusedAdam`` lacks an argument."""

    def __init__(self, params: Iterable[Any], betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {})


FILES: Mapping[str, str] = MappingProxyType(
    {
        "apex/__init__.py": "",
        "apex/optimizers/__init__.py": "from optimizer.apex_stand_in import FusedAdam\n",
        "amp_C.py": "multi_tensor_adam = None\n",
    }
)
"""What is called of the package, by file."""


@contextmanager
def installed(changed: Mapping[str, str | None] = MappingProxyType({})) -> Iterator[None]:
    """Let the package be there.

    Args:
        changed: other texts of its files; ``None``: missing.
    """
    with TemporaryDirectory() as folder:
        for name, text in {**FILES, **changed}.items():
            if text is not None:
                file = Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
        sys.path.insert(0, folder)
        try:
            _forget()
            yield
        finally:
            sys.path.remove(folder)
            _forget()


def _forget() -> None:
    invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("apex", "amp_C")]:
        del sys.modules[name]
