"""What ``Kernels`` promises of norms with a sum, of rotations, and of biases before activations.

Each implementation is compared with a formula in float64 of the same, already rounded, numbers.
"""

from collections.abc import Callable

import pytest
import torch
from kernels.formulas import (
    explicit_gelu,
    explicit_layer_norm,
    explicit_rms_norm,
    explicit_rotation,
    explicit_squared_relu,
)
from kernels.implementations import (
    HALF_UNIT,
    IMPLEMENTATIONS,
    TOLERANCE,
    Implementation,
    relative_error,
)
from kernels.test_contract import assert_same
from torch import Tensor

EACH_IMPLEMENTATION = pytest.mark.parametrize("tried", IMPLEMENTATIONS, ids=str)

ROWS = [(1, 1), (3, 7), (2, 5, 48), (40, 130), (19, 1030)]
"""Shapes: one number, three odd rows, and more rows or columns than a block has."""


def both(result: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack(result)


@pytest.mark.one_in(3)
@EACH_IMPLEMENTATION
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_the_layer_norm_of_a_sum_and_the_sum(tried: Implementation, shape: tuple[int, ...]) -> None:
    if shape[-1] == 1:  # its norm is the bias, whatever it is
        shape = (*shape[:-1], 2)
    inputs = [2 * tried.activation(*shape) + 1, tried.activation(*shape, seed=1)]
    parameters = [tried.activation(shape[-1], seed=seed) for seed in (2, 3)]
    assert_same(
        tried,
        lambda x, part, w, b: both(tried.kernels.add_layer_norm(x, part, w, b, 0.1)),
        lambda x, part, w, b: both((x + part, explicit_layer_norm(x + part, w, b, 0.1))),
        *inputs,
        *parameters,
    )
    assert_same(
        tried,
        lambda x, w, b: both(tried.kernels.add_layer_norm(x, None, w, b, 0.1)),
        lambda x, w, b: both((x, explicit_layer_norm(x, w, b, 0.1))),
        inputs[0],
        *parameters,
    )


@pytest.mark.one_in(3)
@EACH_IMPLEMENTATION
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_the_rms_norm_of_a_sum_and_the_sum(tried: Implementation, shape: tuple[int, ...]) -> None:
    inputs = [2 * tried.activation(*shape) + 1, tried.activation(*shape, seed=1)]
    weight_h = tried.activation(shape[-1], seed=2)
    assert_same(
        tried,
        lambda x, part, w: both(tried.kernels.add_rms_norm(x, part, w, 0.1)),
        lambda x, part, w: both((x + part, explicit_rms_norm(x + part, w, 0.1))),
        *inputs,
        weight_h,
    )
    assert_same(
        tried,
        lambda x, w: both(tried.kernels.add_rms_norm(x, None, w, 0.1)),
        lambda x, w: both((x, explicit_rms_norm(x, w, 0.1))),
        inputs[0],
        weight_h,
    )


@EACH_IMPLEMENTATION
def test_the_norm_of_a_sum_is_that_of_its_rounded_sum(tried: Implementation) -> None:
    """Or a norm that is computed again, from the sum alone, would differ."""
    x, part = 3 * tried.activation(9, 64), tried.activation(9, 64, seed=1)
    weight_h, bias_h = tried.activation(64, seed=2), tried.activation(64, seed=3)
    total, normed = tried.kernels.add_layer_norm(x, part, weight_h, bias_h, 1e-5)
    unit = 2 * HALF_UNIT if tried.cuts_off else 0.0
    torch.testing.assert_close(total, x + part, rtol=unit, atol=0)
    assert torch.equal(normed, tried.kernels.layer_norm(total, weight_h, bias_h, 1e-5))
    total, normed = tried.kernels.add_rms_norm(x, part, weight_h, 1e-5)
    assert torch.equal(normed, tried.kernels.rms_norm(total, weight_h, 1e-5))


@EACH_IMPLEMENTATION
@pytest.mark.parametrize("used", [0, 1], ids=["sum", "norm"])
def test_a_norm_of_a_sum_of_which_one_result_is_used(tried: Implementation, used: int) -> None:
    x, part = (tried.activation(6, 8, seed=seed) for seed in range(2))
    weight_h = tried.activation(8, seed=2)
    assert_same(
        tried,
        lambda x, part: tried.kernels.add_rms_norm(x, part, weight_h, 0.1)[used],
        lambda x, part: (x + part, explicit_rms_norm(x + part, weight_h.double(), 0.1))[used],
        x,
        part,
    )


@EACH_IMPLEMENTATION
def test_norms_of_rows_that_are_apart(tried: Implementation) -> None:
    """As those of keys are, in the output of a fused projection."""
    fused = tried.activation(3, 4, 6, 10)
    weight_h, bias_h = tried.activation(10, seed=1), tried.activation(10, seed=2)
    assert_same(
        tried,
        lambda t: tried.kernels.layer_norm(t[:, :, 4], weight_h, bias_h, 0.1),
        lambda t: explicit_layer_norm(t[:, :, 4], weight_h.double(), bias_h.double(), 0.1),
        fused,
    )
    assert_same(
        tried,
        lambda t: tried.kernels.rms_norm(t[:, :, 4], weight_h, 0.1),
        lambda t: explicit_rms_norm(t[:, :, 4], weight_h.double(), 0.1),
        fused,
    )


@EACH_IMPLEMENTATION
@pytest.mark.parametrize(
    ("name", "formula"), [("gelu", explicit_gelu), ("squared_relu", explicit_squared_relu)]
)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 70, 130)], ids=str)
def test_an_activation_forms_the_gradient_of_a_bias(
    tried: Implementation,
    name: str,
    formula: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
) -> None:
    z, bias_f = tried.activation(*shape), tried.activation(shape[-1], seed=1)
    x = (z + bias_f).requires_grad_()
    bias_f.requires_grad_()
    output = getattr(tried.kernels, name)(x, bias_f)
    wide, wide_bias = (t.detach().double().requires_grad_() for t in (x, torch.zeros_like(bias_f)))
    expected = formula(wide + wide_bias)
    grad = tried.activation(*shape, seed=2)
    got = torch.autograd.grad(output, (x, bias_f), grad)
    want = torch.autograd.grad(expected, (wide, wide_bias), grad.double())
    for own, exact in zip((output, *got), (expected, *want), strict=True):
        assert own.dtype == tried.dtype
        times = 2 if tried.cuts_off else 1  # the square, and the gradient
        assert relative_error(own, exact) < times * TOLERANCE[tried.dtype]


ROTATIONS = [(8, 4, True), (8, 2, False), (6, 2, True), (3, 1, False), (96, 48, False)]
"""Channels of a head, pairs, and whether neighbours make a pair."""


@pytest.mark.pairwise
@pytest.mark.one_in(3)
@EACH_IMPLEMENTATION
@pytest.mark.parametrize("by_sample", [(), (2,), (1,)], ids=["by position", "by sample", "for all"])
@pytest.mark.parametrize(("channels", "pairs", "interleaved"), ROTATIONS)
def test_rotation(
    tried: Implementation, channels: int, pairs: int, interleaved: bool, by_sample: tuple[int, ...]
) -> None:
    batch, seq, heads = 2, 5, 3
    shape = (*by_sample, seq, 1, pairs)
    cos, sin = (function(4 * tried.statistic(*shape)) for function in (torch.cos, torch.sin))
    angle = torch.atan2(sin.double(), cos.double())
    fused = tried.activation(batch, seq, heads + 2, channels, seed=1)
    assert_same(
        tried,
        lambda x: tried.kernels.rotate(x[:, :, 1:4], cos, sin, interleaved=interleaved),
        lambda x: explicit_rotation(
            x[:, :, 1:4], angle.reshape(-1, seq, 1, pairs), interleaved=interleaved
        ),
        fused,
    )


@EACH_IMPLEMENTATION
def test_channels_in_no_pair_keep_their_bits(tried: Implementation) -> None:
    cos, sin = (function(tried.statistic(4, 1, 3)) for function in (torch.cos, torch.sin))
    x = tried.activation(2, 4, 3, 11)
    for interleaved in (False, True):
        turned = tried.kernels.rotate(x, cos, sin, interleaved=interleaved)
        assert turned.is_contiguous()
        assert torch.equal(turned[..., 6:], x[..., 6:])
        assert relative_error(turned[..., :6].norm(dim=-1), x[..., :6].norm(dim=-1)) < 1e-2
