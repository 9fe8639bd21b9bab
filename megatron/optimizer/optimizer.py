"""The interface of optimizers for the training step; an optimizer updates parts of parameters."""

import math
from typing import Protocol

from torch import Tensor

from megatron.optimizer.lr_schedule import Rates


class Optimizer(Protocol):
    """Updates the parts of the parameters that one rank is responsible for."""

    def step(self, rates: Rates, grad_norm: float, factor: float = 1.0) -> None:
        """Update every part from its gradient times ``factor``, and round the weights.

        The gradients may be scaled in place. Afterwards they may only be zeroed. Another step after
        ``restore`` may use them too, but without the factor, which they already contain.

        Args:
            rates: of this step.
            grad_norm: norm of the whole model's gradient, over all ranks, after the factor.
            factor: of the gradients, see ``GlobalState.factor``.

        Raises:
            FloatingPointError: the norm is infinite or NaN; no parameter has been changed.
        """
        ...

    def tensors_of(self, name: str) -> dict[str, Tensor]:
        """Return a part's tensors for a checkpoint, each of the part's shape.

        Args:
            name: of the parameter in the whole model.

        Returns:
            ``weight``, in full precision, and the optimizer's state, by name. They are no copies: a
            caller that changes the tensors must call ``loaded`` afterwards.
        """
        ...

    @property
    def steps(self) -> int:
        """Steps since the start of the training, including steps before a loaded checkpoint."""
        ...

    def loaded(self, steps: int) -> None:
        """Continue from tensors that were loaded, after ``steps`` steps."""
        ...

    def save(self) -> None:
        """Copy the whole state, for ``restore``."""
        ...

    def restore(self) -> None:
        """Undo all steps since ``save``, to the last bit."""
        ...


def check_norm(grad_norm: float) -> None:
    """Refuse a step on a gradient with infinity or NaN.

    Raises:
        FloatingPointError: the norm is infinite or NaN.
    """
    if not math.isfinite(grad_norm):
        raise FloatingPointError(
            f"the gradient norm is {grad_norm}: no step taken; lower --lr, or look for the first "
            "iteration whose loss or norm jumps"
        )
