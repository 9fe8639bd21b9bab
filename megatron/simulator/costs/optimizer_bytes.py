"""Bytes a parameter that an optimizer keeps and moves, beside the 16-bit weight of the passes."""

from dataclasses import dataclass
from typing import Final

FP32_BYTES: Final = 4
NARROW_BYTES: Final = 2


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes a parameter.

    Attributes:
        state: of the fp32 master weight and the moments, which a sharded optimizer spreads. A copy
            of it from which a step can be undone has as many.
        matrix_state: the same of the matrices of layers, if they have a rule of their own.
        gradient: of the main gradient.
    """

    state: float
    matrix_state: float | None = None
    gradient: float = FP32_BYTES

    def of_rank(self, parameters: float, matrices: float) -> float:
        """Return the bytes of state of a rank.

        Args:
            parameters: of the rank.
            matrices: those of them that are in matrices of layers.
        """
        own = self.state if self.matrix_state is None else self.matrix_state
        return self.state * (parameters - matrices) + own * matrices

    def moved(self, parameters: float, matrices: float) -> float:
        """Return the bytes that a step moves; arguments as for ``of_rank``.

        It reads gradients and state, and writes the state and the 16-bit weights.
        """
        beside = self.gradient + NARROW_BYTES
        return 2 * self.of_rank(parameters, matrices) + beside * parameters


ADAM: Final = OptimizerBytes(3 * FP32_BYTES)
"""Master weight and two moments, all fp32."""

SGD: Final = OptimizerBytes(FP32_BYTES)
SGD_WITH_MOMENTUM: Final = OptimizerBytes(2 * FP32_BYTES)
MUON: Final = OptimizerBytes(3 * FP32_BYTES, 2 * FP32_BYTES)
"""Matrices of layers have one moment; Adam has the other parameters."""


def narrow_adam(first: bool, second: bool, gradient: bool) -> OptimizerBytes:
    """Return Adam's bytes with the first moment, the second or the gradient in 16 bits."""
    moments = sum(NARROW_BYTES if narrow else FP32_BYTES for narrow in (first, second))
    return OptimizerBytes(FP32_BYTES + moments, gradient=NARROW_BYTES if gradient else FP32_BYTES)
