"""Norms against their formulas, and their starting values."""

import pytest
import torch

from megatron.layers.norm import build_norm

CPU = torch.device("cpu")


def test_layer_norm_is_its_formula() -> None:
    norm = build_norm("LayerNorm", 8, 0.1, torch.float64, CPU)
    x = torch.randn(3, 8, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(norm(x), expected)


def test_rms_norm_is_its_formula_and_has_no_bias() -> None:
    norm = build_norm("RMSNorm", 8, 0.1, torch.float64, CPU)
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt())
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'BatchNorm': choose LayerNorm or RMSNorm"):
        build_norm("BatchNorm", 8, 1e-5, torch.float32, CPU)  # type: ignore[arg-type] # the point
