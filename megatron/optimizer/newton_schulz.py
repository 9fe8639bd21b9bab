"""The Newton-Schulz iteration: it finds an orthogonal matrix near a given one, by products only.

If U S Vᵀ is the singular value decomposition of a matrix, the iteration keeps U and V and brings
every singular value near 1. Quintic polynomials with a steep slope at 0 need few steps, but the
singular values end in a band around 1 (Jordan, https://kellerjordan.github.io/posts/muon).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from megatron.optimizer.settings import Coefficients, Precision

Step = tuple[float, float, float]
"""Coefficients a, b and c of a step X <- a X + b (X Xᵀ) X + c (X Xᵀ)² X."""

STEPS: Final[Mapping[Coefficients, tuple[Step, ...]]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}
"""Sets of steps by Megatron's names: Jordan's, You's (leloykun.github.io/ponder/muon-opt-coeffs),
Polar Express (arXiv 2505.16932) and almost orthogonal layers (arXiv 2208.03160)."""

EPSILON: Final = 1e-7
"""The smallest norm by which a matrix is divided."""


def coefficients(kind: Coefficients, steps: int) -> tuple[Step, ...]:
    """Return the coefficients of ``steps`` steps.

    Raises:
        ValueError: the set ``kind`` does not allow this number of steps.
    """
    own = STEPS[kind]
    if kind == "polar_express":
        if steps < len(own):
            raise ValueError(f"{kind} takes {len(own)} steps or more")
        return own + own[-1:] * (steps - len(own))
    if steps % len(own):
        raise ValueError(f"{kind} takes a multiple of {len(own)} steps")
    return own * (steps // len(own))


def orthogonalized(
    matrix: torch.Tensor, steps: Sequence[Step], precision: Precision
) -> torch.Tensor:
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1.

    Args:
        matrix: [m, n], full precision; or several matrices [e, m, n], each by itself.
        steps: the coefficients of every step.
        precision: of the products.

    Returns:
        A tensor of the shape and dtype of ``matrix``; zero where a matrix is zero.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    x_mn = matrix.mT if tall else matrix  # so that X Xᵀ is the smaller product
    x_mn = at_norm_1(x_mn, squared_norm(x_mn), precision)
    x_mn = iterated(x_mn, steps, precision)
    return (x_mn.mT if tall else x_mn).to(matrix.dtype)


def squared_norm(matrix: torch.Tensor) -> torch.Tensor:
    """Return the square of the Frobenius norm of [m, n] as [1, 1], or of [e, m, n] as [e, 1, 1]."""
    norm: torch.Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return norm.square()


def at_norm_1(matrix: torch.Tensor, square: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Return ``matrix`` divided by its norm, in the dtype of the iteration's products.

    The Frobenius norm is no less than any singular value. So all begin at 1 or below, where the
    polynomials bring them near 1.

    Args:
        matrix: [m, n] or [e, m, n].
        square: ``squared_norm`` of it; of a slice, of the whole matrix.
        precision: of the products.
    """
    divided = matrix / square.sqrt().clamp_min(EPSILON)
    return divided.to(torch.bfloat16) if precision == "medium" else divided


def iterated(
    x_mn: torch.Tensor,
    steps: Sequence[Step],
    precision: Precision,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda product_mm: product_mm,
) -> torch.Tensor:
    """Return matrices after the iteration's steps.

    Args:
        x_mn: [m, n] or [e, m, n], of norm 1 or less; of a slice, some columns of every row.
        steps: the coefficients of every step.
        precision: of the products.
        total: sums X Xᵀ over the slices of a matrix, which it may do in place.
    """
    add_product = torch.baddbmm if x_mn.dim() == 3 else torch.addmm
    with _products_in(precision):
        for a, b, c in steps:
            a_mm = total(x_mn @ x_mn.mT)
            # b A + c A² for A = X Xᵀ in one product, and then a X + (b A + c A²) X in another.
            b_mm = add_product(a_mm, a_mm, a_mm, beta=b, alpha=c)
            x_mn = add_product(x_mn, b_mm, x_mn, beta=a)
    return x_mn


@contextmanager
def _products_in(precision: Precision) -> Iterator[None]:
    """Set the ``precision`` that PyTorch uses for products of fp32 matrices."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
