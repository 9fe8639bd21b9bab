"""What ``TileOperations`` promises, of every implementation that works on tiles, in every type.

Each is compared with a formula in float64 of the same, already rounded, numbers.

Shapes: n tokens, h hidden size, t rows of the vocabulary, v all of them.
"""

import pytest
import torch
from kernels.implementations import HALF_UNIT, IMPLEMENTATIONS, Implementation

WITH_TILES = [each for each in IMPLEMENTATIONS if each.name != "cuda"]

pytestmark = pytest.mark.parametrize("tried", WITH_TILES, ids=str)

TILES = [(1, 1), (3, 5), (31, 64), (33, 65), (64, 130), (100, 513)]
"""Rows and tokens."""


@pytest.mark.parametrize(("rows", "tokens"), TILES)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_exponentials_carry_maximum_sum_and_input_gradient_over_tiles(
    tried: Implementation, rows: int, tokens: int, scale: float
) -> None:
    tiles = [scale * tried.activation(rows, tokens, seed=seed) for seed in range(3)]
    weights = [tried.activation(rows, 8, seed=seed) for seed in range(3, 6)]
    logits_vn, weight_vh = torch.cat(tiles).double(), torch.cat(weights).double()
    max_n, sum_n = torch.full_like(tried.statistic(tokens), -torch.inf), tried.statistic(tokens) * 0
    total_nh = tried.statistic(tokens, 8) * 0
    for tile_tn, weight_th in zip(tiles, weights, strict=True):
        before, old_max_n = tile_tn.clone().double(), max_n.clone()
        shrink_n = tried.tile_kernels.exponentials_(tile_tn, max_n, sum_n)
        torch.testing.assert_close(shrink_n, (old_max_n - max_n).exp(), rtol=1e-6, atol=1e-37)
        # Below 1e-37 a kernel need not vanish; fp16 has multiples of 2**-24 only.
        expected = (before - max_n.double()).exp()
        halves = {torch.bfloat16: HALF_UNIT, torch.float16: 2**-11}
        rtol = {**halves, torch.float32: 3e-5}.get(tried.dtype, 1e-12)
        atol = 2**-25 if tried.dtype == torch.float16 else 1e-37
        torch.testing.assert_close(tile_tn.double(), expected, rtol=rtol, atol=atol)
        tried.tile_kernels.carry_input_gradient_(total_nh, shrink_n, tile_tn, weight_th)
    exact_vn = (logits_vn - logits_vn.amax(0)).exp()
    assert torch.equal(max_n.double(), logits_vn.amax(0))
    torch.testing.assert_close(sum_n.double(), exact_vn.sum(0), rtol=1e-5, atol=0)
    size = float(exact_vn.sum(0).max() * weight_vh.abs().max())  # terms may cancel
    error_nh = (total_nh.double() - exact_vn.T @ weight_vh).abs()
    assert error_nh.max() < 2 * rtol * size


@pytest.mark.parametrize(("rows", "tokens"), TILES)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_exponentials_relative_to_a_known_maximum(
    tried: Implementation, rows: int, tokens: int, scale: float
) -> None:
    """The maximum is that of all rows, here of these or of more; a logit may round beyond it."""
    logits_tn = scale * tried.activation(rows, tokens)
    shift_n = logits_tn.amax(0).to(tried.statistics) + tried.statistic(tokens, seed=1).abs()
    shift_n[::3] = logits_tn.amax(0)[::3] * (1 - 2**-9)
    expected = (logits_tn.double() - shift_n.double()).exp()
    tried.tile_kernels.shifted_exponentials_(logits_tn, shift_n)
    halves = {torch.bfloat16: HALF_UNIT, torch.float16: 2**-11}
    rtol = ({torch.float32: 3e-5} | halves).get(tried.dtype, 1e-12)
    atol = 2**-25 if tried.dtype == torch.float16 else 1e-37
    torch.testing.assert_close(logits_tn.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_stay_visible(tried: Implementation, value: float) -> None:
    logits_tn = tried.activation(40, 70)
    logits_tn[7, 9] = value
    max_n, sum_n = torch.full_like(tried.statistic(70), -torch.inf), tried.statistic(70) * 0
    tried.tile_kernels.exponentials_(logits_tn.clone(), max_n, sum_n)
    finite = sum_n.isfinite()
    assert not finite[9]
    assert finite.sum() == 69
    tried.tile_kernels.shifted_exponentials_(logits_tn, max_n)
    assert logits_tn[:, torch.arange(70) != 9].isfinite().all()
    assert not logits_tn[7, 9].isfinite()


@pytest.mark.parametrize(("rows", "tokens"), TILES)
def test_both_gradients_of_a_tile(tried: Implementation, rows: int, tokens: int) -> None:
    exp_tn, weight_th = tried.activation(rows, tokens), tried.activation(rows, 8, seed=1)
    x_nh, factor_n = tried.activation(tokens, 8, seed=2), tried.statistic(tokens, seed=3)
    gradient_nh, gradient_th = tried.statistic(tokens, 8, seed=4), tried.statistic(rows, 8, seed=5)
    wide_tn, scale_n1 = exp_tn.double(), factor_n.double().unsqueeze(1)
    want_nh = gradient_nh.double() + scale_n1 * (wide_tn.T @ weight_th.double())
    want_th = gradient_th.double() + wide_tn @ (scale_n1 * x_nh.double())
    tried.tile_kernels.add_input_gradient_(gradient_nh, factor_n, exp_tn, weight_th)
    tried.tile_kernels.add_weight_gradient_(gradient_th, factor_n, exp_tn, x_nh)
    tried.assert_close(gradient_nh, want_nh)
    tried.assert_close(gradient_th, want_th)


@pytest.mark.parametrize(("rows", "tokens"), [*TILES, (32, 64), (257, 1100)])
def test_every_element_of_a_tile_meets_its_row_and_its_token(
    tried: Implementation, rows: int, tokens: int
) -> None:
    """Products with a matrix of ones on the diagonal are exact: they show the tile and X."""
    exp_tn, factor_n = tried.activation(rows, tokens), tried.statistic(tokens, seed=1)
    one_per_row = torch.eye(rows, device=tried.device, dtype=tried.dtype)
    shown_nt = torch.ones(tokens, rows, device=tried.device, dtype=tried.statistics)
    tried.tile_kernels.carry_input_gradient_(shown_nt, 0 * factor_n, exp_tn, one_per_row)
    assert torch.equal(shown_nt, exp_tn.T.to(tried.statistics))
    x_nh = tried.activation(tokens, 8, seed=2)
    one_per_token = torch.eye(tokens, device=tried.device, dtype=tried.dtype)
    shown_nh = torch.zeros(tokens, 8, device=tried.device, dtype=tried.statistics)
    tried.tile_kernels.add_weight_gradient_(shown_nh, factor_n, one_per_token, x_nh)
    rounded_once_nh = (x_nh * factor_n.unsqueeze(1)).to(tried.dtype)
    assert torch.equal(shown_nh, rounded_once_nh.to(tried.statistics))
