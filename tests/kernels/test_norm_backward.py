"""The backward of a norm that was formed elsewhere, against autograd in float64."""

from collections.abc import Callable

import pytest
import torch
from harness.marks import full
from kernels.formulas import explicit_layer_norm, explicit_rms_norm
from kernels.implementations import IMPLEMENTATIONS, Implementation
from torch import Tensor

EPSILON = 0.1


@pytest.mark.parametrize("tried", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize(
    ("shape", "centred", "joins"),
    [
        ((3, 7), True, False),
        ((2, 5, 48), False, True),
        full((2, 5, 48), False, False),
        full((40, 130), True, True),
        full((19, 1030), False, True),
    ],
)
def test_gradients_are_those_of_the_formula(
    tried: Implementation, shape: tuple[int, ...], centred: bool, joins: bool
) -> None:
    x, grad = 2 * tried.activation(*shape) + 1, tried.activation(*shape, seed=1)
    weight_h, stream_grad = tried.activation(shape[-1], seed=2), tried.activation(*shape, seed=3)
    rows, mean_n = x.flatten(0, -2).double(), None
    if centred:
        mean_n = rows.mean(-1)
        rows = rows - mean_n[:, None]
        mean_n = mean_n.to(tried.statistics)
    inverse_n = (rows.square().mean(-1) + EPSILON).rsqrt().to(tried.statistics)
    found = tried.kernels.norm_backward(
        x, weight_h, mean_n, inverse_n, grad, stream_grad if joins else None
    )
    inputs = [x, weight_h] + [torch.zeros_like(weight_h)] * centred
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    formula: Callable[..., Tensor] = explicit_layer_norm if centred else explicit_rms_norm
    expected = list(torch.autograd.grad(formula(*exact, EPSILON), exact, grad.double()))
    expected[0] += stream_grad * joins
    assert (found[2] is None) != centred
    for own, wanted in zip(found, expected, strict=False):
        assert own is not None
        assert own.dtype == tried.dtype
        tried.assert_close(own, wanted)
