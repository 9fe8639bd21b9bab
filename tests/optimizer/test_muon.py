"""Muon's updates against singular value decompositions in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer.entries import QKV, entries, optimizer_of, rates_of
from reference.plain_optimizers import PlainMuon, polar
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.layers.main_grad import main_grad_of
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.muon import update_length
from megatron.optimizer.newton_schulz import STEPS, coefficients, orthogonalized
from megatron.optimizer.settings import Coefficients, MuonSettings, OptimizerSettings, ScaleMode

CPU = torch.device("cpu")
LAYER = "decoder.layers.3."
SHAPES = {
    f"{LAYER}self_attention.linear_qkv.weight": (3 * 8, 6),
    f"{LAYER}self_attention.linear_qkv.bias": (24,),
    f"{LAYER}mlp.linear_fc1.weight": (12, 6),
    "embedding.word_embeddings.weight": (9, 6),
    "embedding.position_embeddings.weight": (5, 6),
}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def random_matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


@settings(deadline=None)
@given(
    rows=st.integers(1, 24),
    columns=st.integers(1, 24),
    kind=st.sampled_from(list(STEPS)),
    repeats=st.integers(1, 2),
    scale=st.sampled_from([1e-8, 1e-3, 1.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_the_iteration_is_a_polynomial_of_the_singular_values(
    rows: int, columns: int, kind: Coefficients, repeats: int, scale: float, seed: int
) -> None:
    matrix = random_matrix(rows, columns, seed) * scale
    steps = coefficients(kind, repeats * len(STEPS[kind]))
    found = orthogonalized(matrix, steps, "highest")
    torch.testing.assert_close(found, polar(matrix, steps), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("kind", "band"), [("quintic", 0.35), ("polar_express", 0.05)])
@pytest.mark.parametrize(("precision", "error"), [("highest", 1e-3), ("medium", 0.05)])
def test_singular_values_come_near_1(
    kind: Coefficients, band: float, precision: str, error: float
) -> None:
    """With bf16 products too, which is what ``medium`` means."""
    matrix = random_matrix(64, 48, 1).float()
    steps = coefficients(kind, len(STEPS[kind]))
    found = orthogonalized(matrix, steps, "highest" if precision == "highest" else "medium")
    assert found.dtype == torch.float32
    values = torch.linalg.svdvals(found)
    assert 1 - band - error < values.min()
    assert values.max() < 1 + band + error
    relative = (found - polar(matrix.double(), steps)).norm() / found.norm()
    assert relative < error
    assert precision == "highest" or relative > 1e-4, "these were no bf16 products"


def test_a_matrix_without_gradient_is_left_alone() -> None:
    found = orthogonalized(torch.zeros(4, 3), coefficients("quintic", 5), "medium")
    assert not found.any()


@pytest.mark.parametrize("shape", [(5, 4, 3), (5, 3, 4)])
def test_each_of_several_matrices_stands_by_itself(shape: tuple[int, int, int]) -> None:
    """One without a gradient too, as that of an expert that no token has chosen."""
    generator = torch.Generator().manual_seed(0)
    several = torch.randn(shape, generator=generator, dtype=torch.float64)
    several[1] *= 1e3
    several[2] = 0
    steps = coefficients("quintic", 5)
    together = orthogonalized(several, steps, "highest")
    apart = torch.stack([orthogonalized(each, steps, "highest") for each in several])
    torch.testing.assert_close(together, apart)
    assert not together[2].any()


@pytest.mark.parametrize(
    ("kind", "steps", "words"),
    [("quintic", 6, "multiple of 5"), ("aol", 5, "multiple of 4"), ("polar_express", 7, "8 steps")],
)
def test_sets_of_steps_are_whole(kind: Coefficients, steps: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        coefficients(kind, steps)


def test_the_last_step_of_polar_express_repeats() -> None:
    assert coefficients("polar_express", 10)[7:] == (STEPS["polar_express"][-1],) * 3


@pytest.mark.parametrize(
    ("mode", "lengths"),
    [
        ("spectral", (3.0, 3.0)),
        ("unit_rms_norm", (1.5, 2 / 3)),
        ("shape_scaling", (1.5, 1.0)),
    ],
)
def test_lengths_of_updates(mode: ScaleMode, lengths: tuple[float, float]) -> None:
    assert (update_length(9, 4, mode), update_length(4, 9, mode)) == pytest.approx(lengths)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-6), (torch.bfloat16, 2**-6)]
)
def test_steps_follow_the_formulas(dtype: torch.dtype, tolerance: float, nesterov: bool) -> None:
    """Fused matrices by their parts; AdamW for words and biases; clipping and decay for all."""
    muon = MuonSettings(muon_momentum=0.8, muon_nesterov=nesterov, muon_fp32_matmul_prec="highest")
    config = OptimizerSettings(
        lr=0.1, weight_decay=0.3, optimizer="muon", muon=muon, clip_grad=1.0, adam_eps=1e-6
    )
    ours = {name: nn.Parameter(value.to(dtype)) for name, value in drawn(0).items()}
    plain = {name: value.detach().double() for name, value in ours.items()}
    owned = entries(ours.items())
    bucket = Bucket(owned, kernels_for(CPU, dtype))
    optimizer = optimizer_of(config, owned)
    reference = PlainMuon(QKV.split, 0.8, nesterov, 0.3, (0.9, 0.999, 1e-6))
    for step, lr in enumerate((0.01, 0.05, 0.02)):
        gradients = drawn(step + 1)
        norm = float(torch.cat([value.flatten() for value in gradients.values()]).norm())
        for name, value in gradients.items():
            main_grad_of(ours[name]).copy_(value)
            plain[name].grad = value.double() * min(1.0, 1.0 / (norm + 1e-6))
        optimizer.step(rates_of(config, lr), norm)
        reference.step(plain, lr)
        bucket.gradients.zero_()
    for name, value in plain.items():
        torch.testing.assert_close(
            ours[name].detach().double(), value, rtol=tolerance, atol=tolerance, msg=name
        )


def test_queries_keys_and_values_may_be_one_matrix() -> None:
    name, shape = f"{LAYER}self_attention.linear_qkv.weight", (24, 6)
    gradient = random_matrix(*shape, 5)
    moved = []
    for split in (True, False):
        parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        owned = entries([(name, parameter)])
        Bucket(owned, kernels_for(CPU, torch.float64))
        muon = MuonSettings(
            muon_split_qkv=split, muon_fp32_matmul_prec="highest", muon_momentum=0.0
        )
        config = OptimizerSettings(lr=1.0, optimizer="muon", muon=muon, weight_decay=0.0)
        main_grad_of(parameter).copy_(gradient)
        optimizer_of(config, owned).step(rates_of(config, 1.0), grad_norm=0.5)
        moved.append(-parameter.detach())
    torch.testing.assert_close(moved[1], polar(gradient) * math.sqrt(24), rtol=1e-6, atol=1e-6)
    query = [row for row in range(24) if row % 8 < 4]
    expected = polar(gradient[query]) * math.sqrt(12)
    torch.testing.assert_close(moved[0][query], expected, rtol=1e-6, atol=1e-6)
