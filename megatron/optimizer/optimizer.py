"""What the training step asks of an optimizer; every optimizer works on parts of parameters."""

import math
from typing import Protocol

from torch import Tensor

from megatron.optimizer.lr_schedule import Rates


class Optimizer(Protocol):
    """Updates the parts of the parameters that one rank is responsible for."""

    def step(self, rates: Rates, grad_norm: float, factor: float = 1.0) -> None:
        """Update every part from its gradient times ``factor``, and round the weights.

        The gradients are scaled in place. Afterwards they may only be zeroed, or used by another
        step after ``restore``, without the factor.

        Args:
            rates: of this step.
            grad_norm: norm of the whole model's gradient, over all ranks, after the factor.
            factor: of the gradients, see ``GlobalState.factor``.

        Raises:
            FloatingPointError: the norm is infinite or NaN; no parameter has been changed.
        """
        ...

    def tensors_of(self, name: str) -> dict[str, Tensor]:
        """Return what a checkpoint keeps of a part, each of the part's shape.

        Args:
            name: of the parameter in the whole model.

        Returns:
            ``weight``, in full precision, and what else the optimizer needs, by name: the tensors
            themselves. Whoever changes them calls ``loaded``.
        """
        ...

    @property
    def steps(self) -> int:
        """Steps taken since the start of the training, those before a checkpoint included."""
        ...

    def loaded(self, steps: int) -> None:
        """Go on from tensors that were loaded, after so many steps."""
        ...

    def save(self) -> None:
        """Keep all of the state as it is, for ``restore``."""
        ...

    def restore(self) -> None:
        """Undo all steps since ``save``, to the last bit."""
        ...


def check_norm(grad_norm: float) -> None:
    """Refuse a step on a gradient that is no number.

    Raises:
        FloatingPointError: the norm is infinite or NaN.
    """
    if not math.isfinite(grad_norm):
        raise FloatingPointError(
            f"the gradient norm is {grad_norm}: no step taken; lower --lr, or look for the first "
            "iteration whose loss or norm jumps"
        )
