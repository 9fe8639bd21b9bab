"""The rotation against complex numbers, and what makes it a position embedding."""

import math

import pytest
import torch
from torch import Tensor

from megatron.layers.rope import RotaryEmbedding
from megatron.layers.rope_scaling import (
    DynamicScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("percent", "rotated"), [(1.0, 8), (0.5, 4), (0.25, 2)])
def test_pairs_turn_like_complex_numbers_and_the_rest_stays(
    percent: float, rotated: int, interleaved: bool
) -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    expected = x.clone()
    for position in range(5):
        for pair in range(rotated // 2):
            real, imaginary = (
                (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotated // 2)
            )
            angle = position * 500.0 ** (-2 * pair / rotated)
            turn = torch.polar(torch.tensor(1.0).double(), torch.tensor(angle).double())
            turned = torch.complex(x[:, position, :, real], x[:, position, :, imaginary]) * turn
            expected[:, position, :, real] = turned.real
            expected[:, position, :, imaginary] = turned.imag
    output = RotaryEmbedding(8, 16, percent, 500, CPU, interleaved=interleaved)(x)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output[..., rotated:], x[..., rotated:], rtol=0, atol=0)


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 12, 1, 8)
    rope = RotaryEmbedding(8, 12, 1.0, 10000, CPU)
    scores = torch.einsum("bsad,btad->st", rope(q), rope(k))
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        Llama3Scaling(),
        YarnScaling(4.0, 16),
        DynamicScaling(4.0, 16, 64),
        LongRopeScaling(4.0, 16, (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5)),
    ],
)
@pytest.mark.parametrize("base", [500, 10000, 11158840, 10**12])
def test_a_whole_theta_has_the_bits_of_the_same_integer(
    base: int, scaling: RopeScaling | None
) -> None:
    """Checkpoints of before hold an integer, and their models must not change."""
    one, other = (
        RotaryEmbedding(16, 64, 1.0, kind(base), CPU, scaling=scaling).tables
        for kind in (int, float)
    )
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("base", [999999.4420358813, 10000.5, 1.5])
def test_a_theta_need_not_be_whole(base: float) -> None:
    cos_s1r, _ = RotaryEmbedding(8, 32, 1.0, base, CPU, dtype=torch.float64).tables
    wanted = [[math.cos(s * base ** (-i / 4)) for i in range(4)] for s in range(32)]
    torch.testing.assert_close(cos_s1r[:, 0], torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_is_the_rotation_back(interleaved: bool) -> None:
    rope = RotaryEmbedding(6, 4, 0.67, 100, CPU, interleaved=interleaved)
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rope, (x,))


@pytest.mark.parametrize("interleaved", [False, True])
def test_bf16_is_rounded_once_even_at_far_positions(interleaved: bool) -> None:
    seq = 4096
    x = torch.randn(1, seq, 2, 64).bfloat16()
    rope = RotaryEmbedding(64, seq, 1.0, 10000, CPU, interleaved=interleaved)
    narrow, wide = rope(x), rope(x.double())
    assert narrow.dtype == torch.bfloat16
    # half a unit in the last of bf16's eight bits
    torch.testing.assert_close(narrow.double(), wide, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("percent", [0.0, 0.4, 1.5])
def test_channels_that_form_no_pairs_are_refused(percent: float) -> None:
    with pytest.raises(ValueError, match=f"--rotary-percent {percent} rotates"):
        RotaryEmbedding(8, 4, percent, 10000, CPU)


def test_heads_of_both_pairings_give_the_same_scores_if_their_channels_are_permuted() -> None:
    q, k = torch.randn(2, 2, 6, 3, 8, dtype=torch.float64)
    halves, neighbours = (
        RotaryEmbedding(8, 6, 1.0, 100, CPU, interleaved=interleaved)
        for interleaved in (False, True)
    )

    def joined(x: Tensor) -> Tensor:  # channels 0, 4, 1, 5, ... become neighbours
        pairs: Tensor = x.unflatten(-1, (2, 4))
        return pairs.transpose(-1, -2).flatten(-2)

    torch.testing.assert_close(joined(halves(q)), neighbours(joined(q)), rtol=0, atol=0)
    scores = torch.einsum("bsad,btad->bast", halves(q), halves(k))
    same = torch.einsum("bsad,btad->bast", neighbours(joined(q)), neighbours(joined(k)))
    torch.testing.assert_close(scores, same)


def llama3_frequency(frequency: float, scaling: Llama3Scaling) -> float:
    """As the ``llama3`` rope type of Hugging Face's transformers has it, by wavelength."""
    longest = scaling.original_length / scaling.low_freq_factor
    shortest = scaling.original_length / scaling.high_freq_factor
    wavelength = 2 * math.pi / frequency
    if wavelength < shortest:
        return frequency
    if wavelength > longest:
        return frequency / scaling.factor
    smooth = (scaling.original_length / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@pytest.mark.parametrize(
    "scaling",
    [
        Llama3Scaling(),  # Llama 3.1
        Llama3Scaling(factor=32.0),  # Llama 3.2
        Llama3Scaling(factor=4.0, low_freq_factor=2.0, high_freq_factor=3.0, original_length=2048),
    ],
)
def test_llama3_scaling_is_that_of_transformers(scaling: Llama3Scaling) -> None:
    plain = [500_000.0 ** (-2 * pair / 128) for pair in range(64)]
    expected = [llama3_frequency(frequency, scaling) for frequency in plain]
    assert 0 < sum(f == e for f, e in zip(plain, expected, strict=True)) < 64
    got = scaling.scaled(torch.tensor(plain, dtype=torch.float64))
    torch.testing.assert_close(got.tolist(), expected, rtol=1e-12, atol=0)


def test_llama3_scaling_turns_the_heads() -> None:
    """Each pair of ones turns to cos - sin and cos + sin of its scaled angle."""
    scaling, seq = Llama3Scaling(), 300
    x = torch.ones(1, seq, 1, 128, dtype=torch.float64)
    output = RotaryEmbedding(128, seq, 1.0, 500_000, CPU, scaling=scaling)(x)[0, :, 0]
    for pair in (0, 28, 29, 33, 35, 63):  # turn often, in between and seldom
        frequency = llama3_frequency(500_000.0 ** (-2 * pair / 128), scaling)
        angle = (seq - 1) * frequency
        assert output[-1, pair].item() == pytest.approx(math.cos(angle) - math.sin(angle), abs=1e-6)
        assert output[-1, pair + 64].item() == pytest.approx(
            math.cos(angle) + math.sin(angle), abs=1e-6
        )


def transformers_angles(
    scaling: dict[str, object], seq: int, positions: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [s, r] of transformers' own rotary embedding for heads of 32 channels."""
    transformers = pytest.importorskip("transformers", reason="the reference")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=positions,
        rope_theta=10000.0,
        rope_scaling=scaling,
    )
    embedding = llama.LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1, seq, 128), torch.arange(seq)[None])
    return cos[0, :, :16], sin[0, :, :16]


SHORT, LONG = (tuple(1 + pair * step for pair in range(16)) for step in (0.125, 1.5))
"""Divisors of 16 frequencies, in short and in long samples."""


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (YarnScaling(4.0, 64), {}),
        (YarnScaling(40.0, 64, mscale=0.7, mscale_all_dim=0.4), {}),
        (YarnScaling(8.0, 300, 6.0, 0.5, exact_range=True), {}),
        (YarnScaling(4.0, 40, 4.0, 3.9, exact_range=True), {}),
        (YarnScaling(4.0, 100_000, 3.0, 1.0), {}),
        (YarnScaling(4.0, 64, 1.0, 1.0), {}),
        (YarnScaling(4.0, 64, 1.0, 1.0, exact_range=True), {}),
        (LongRopeScaling(4.0, 400, SHORT), {}),
        (LongRopeScaling(32.0, 64, LONG), {}),
        (LongRopeScaling(1.0, 64, LONG), {}),
        (DynamicScaling(4.0, 64, 300), {"max_position_embeddings": 64}),
        (DynamicScaling(2.0, 200, 300), {"max_position_embeddings": 200}),
        (DynamicScaling(2.0, 400, 300), {"max_position_embeddings": 400}),
    ],
)
def test_scaled_angles_are_those_of_transformers(
    ours: YarnScaling | LongRopeScaling | DynamicScaling, theirs: dict[str, int]
) -> None:
    seq = 300
    scaling: dict[str, object] = {"rope_type": "dynamic", "factor": ours.factor}
    if isinstance(ours, LongRopeScaling):
        scaling |= {
            "rope_type": "longrope",
            "original_max_position_embeddings": ours.original_length,
            "short_factor": list(SHORT),
            "long_factor": list(LONG),
        }
    if isinstance(ours, YarnScaling):
        scaling |= {
            "rope_type": "yarn",
            "original_max_position_embeddings": ours.original_length,
            "beta_fast": ours.beta_fast,
            "beta_slow": ours.beta_slow,
            "truncate": not ours.exact_range,
        }
        if ours.mscale_all_dim:
            scaling |= {"mscale": ours.mscale, "mscale_all_dim": ours.mscale_all_dim}
    cos, sin = transformers_angles(scaling, seq, theirs.get("max_position_embeddings", 400))
    x = torch.ones(1, seq, 1, 32)
    turned = RotaryEmbedding(32, seq, 1.0, 10000, CPU, scaling=ours)(x)[0, :, 0]
    # theirs come from fp32 frequencies, and position 299 multiplies their error
    torch.testing.assert_close(turned, torch.cat((cos - sin, cos + sin), -1), atol=1e-4, rtol=0)
    plain = RotaryEmbedding(32, seq, 1.0, 10000, CPU)(x)[0, :, 0]
    is_scaled = not isinstance(ours, DynamicScaling) or ours.original_length < seq
    assert is_scaled == bool((turned - plain).abs().max() > 0.1)


def test_scaled_positions_keep_their_angles_when_they_are_given() -> None:
    scaling = YarnScaling(4.0, 8)
    rope = RotaryEmbedding(8, 9, 1.0, 100, CPU, scaling=scaling)
    x = torch.randn(2, 6, 3, 8)
    assert torch.equal(rope(x), rope.at(torch.arange(6).expand(2, 6))(x))
    torch.testing.assert_close(rope(x)[:, 0], x[:, 0] * scaling.magnitude)


def test_tokens_at_given_positions_turn_by_the_angles_of_those() -> None:
    rope = RotaryEmbedding(8, 6, 1.0, 100, CPU)
    x = torch.randn(2, 6, 3, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]])
    turned = rope.at(positions)(x)
    for sample, row in enumerate(positions.tolist()):
        for token, position in enumerate(row):
            moved = torch.zeros(1, 6, 3, 8)
            moved[0, position] = x[sample, token]
            assert torch.equal(turned[sample, token], rope(moved)[0, position])


def test_positions_of_the_sample_change_no_bit() -> None:
    rope = RotaryEmbedding(8, 9, 0.5, 100, CPU, interleaved=True)
    x = torch.randn(2, 6, 3, 8, requires_grad=True)
    grad = torch.randn(2, 6, 3, 8)
    results = [
        (y, torch.autograd.grad(y, x, grad)[0])
        for y in (rope(x), rope.at(torch.arange(6).expand(2, 6))(x))
    ]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_table_without_values_has_the_size_of_one_with_values() -> None:
    meta, host = (
        RotaryEmbedding(16, 24, 0.5, 10_000, torch.device(name), scaling=Llama3Scaling())
        for name in ("meta", "cpu")
    )
    for without, real in zip(meta.tables, host.tables, strict=True):
        assert without.is_meta
        assert (without.shape, without.stride(), without.dtype) == (
            real.shape, real.stride(), real.dtype
        )  # fmt: skip
