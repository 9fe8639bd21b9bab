"""The rotation against complex numbers, and what makes it a position embedding."""

import pytest
import torch

from megatron.layers.rope import RotaryEmbedding

CPU = torch.device("cpu")


@pytest.mark.parametrize(("percent", "rotated"), [(1.0, 8), (0.5, 4), (0.25, 2)])
def test_pairs_turn_like_complex_numbers_and_the_rest_stays(percent: float, rotated: int) -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    half = rotated // 2
    expected = x.clone()
    for position in range(5):
        for pair in range(half):
            angle = position * 500.0 ** (-2 * pair / rotated)
            turn = torch.polar(torch.tensor(1.0).double(), torch.tensor(angle).double())
            turned = torch.complex(x[:, position, :, pair], x[:, position, :, pair + half]) * turn
            expected[:, position, :, pair] = turned.real
            expected[:, position, :, pair + half] = turned.imag
    output = RotaryEmbedding(8, 16, percent, 500, CPU)(x)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output[..., rotated:], x[..., rotated:], rtol=0, atol=0)


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 12, 1, 8)
    rope = RotaryEmbedding(8, 12, 1.0, 10000, CPU)
    scores = torch.einsum("bsad,btad->st", rope(q), rope(k))
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)


def test_gradient_is_the_rotation_back() -> None:
    rope = RotaryEmbedding(6, 4, 0.67, 100, CPU)
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rope, (x,))


def test_bf16_is_rounded_once_even_at_far_positions() -> None:
    seq = 4096
    x = torch.randn(1, seq, 2, 64).bfloat16()
    rope = RotaryEmbedding(64, seq, 1.0, 10000, CPU)
    narrow, wide = rope(x), rope(x.double())
    assert narrow.dtype == torch.bfloat16
    # half a unit in the last of bf16's eight bits
    torch.testing.assert_close(narrow.double(), wide, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("percent", [0.0, 0.4, 1.5])
def test_channels_that_form_no_pairs_are_refused(percent: float) -> None:
    with pytest.raises(ValueError, match=f"--rotary-percent {percent} rotates"):
        RotaryEmbedding(8, 4, percent, 10000, CPU)
