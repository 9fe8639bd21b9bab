"""Parts of attention, put together, are attention; every kernel agrees with the specification."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron.kernels.reference.partial_attention import (
    GPU_FLASH,
    HOST_FLASH,
    MULTIPLIED,
    PartialAttention,
)

B, HEADS, GROUPS, S, Z, D = 2, 4, 2, 6, 10, 8
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def operands(dtype: torch.dtype, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(heads: int, length: int) -> Tensor:
        return torch.randn(B, heads, length, D, generator=generator, dtype=torch.float64).to(dtype)

    return draw(HEADS, S), draw(GROUPS, keys), draw(GROUPS, keys)


def written_out(operands: Sequence[Tensor], scale: float, *, causal: bool) -> Tensor:
    """Attention in float64, with a copy of keys and values for every head."""
    q, *shared = operands
    k, v = (t.repeat_interleave(HEADS // GROUPS, 1) for t in shared)
    score = torch.einsum("basd,bazd->basz", q, k) * scale
    if causal:
        score = score.masked_fill(~torch.ones(score.shape[-2:]).tril().bool(), -torch.inf)
    return torch.einsum("basz,bazd->basd", score.softmax(-1), v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("kernels", [MULTIPLIED, HOST_FLASH], ids=["multiplied", "host flash"])
def test_one_part_is_attention(kernels: PartialAttention, dtype: torch.dtype, causal: bool) -> None:
    given = operands(dtype, S if causal else Z)
    wide = [t.double().clone().requires_grad_() for t in given]
    grad = torch.randn(B, HEADS, S, D, dtype=torch.float64)
    expected = written_out(wide, 0.5, causal=causal)
    gradients = torch.autograd.grad(expected, wide, grad.to(dtype).double())
    out, log = kernels.forward(*given, causal, 0.5)
    found = kernels.backward(grad.to(dtype), *given, out, log, causal, 0.5)
    for one, other in zip((out, *found), (expected.detach(), *gradients), strict=True):
        assert one.dtype == dtype
        error = (one.double() - other).norm() / other.norm()
        assert float(error) < BOUNDS[dtype]


@pytest.mark.parametrize("kernels", [MULTIPLIED, HOST_FLASH], ids=["multiplied", "host flash"])
def test_two_parts_make_a_whole(kernels: PartialAttention) -> None:
    q, k, v = operands(torch.float64, Z)
    cuts = slice(0, 3), slice(3, Z)
    parts = [kernels.forward(q, k[:, :, cut], v[:, :, cut], False, 0.5) for cut in cuts]
    log = torch.logsumexp(torch.stack([own for _, own in parts]), 0)
    (first, first_log), (second, second_log) = parts
    out = (first_log - log).exp().unsqueeze(-1) * first
    out += (second_log - log).exp().unsqueeze(-1) * second
    wide = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = written_out(wide, 0.5, causal=False)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-12)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, wide, grad)
    both = [
        kernels.backward(grad, q, k[:, :, cut], v[:, :, cut], out, log, False, 0.5) for cut in cuts
    ]
    found = (
        both[0][0] + both[1][0],
        *(torch.cat((both[0][i], both[1][i]), 2) for i in (1, 2)),
    )
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: the kernel there is another")
def test_queries_and_logarithms_may_be_a_part_of_a_tensor_on_a_gpu() -> None:
    """PyTorch's backward reads the logarithms as if they lay densely, and says nothing."""
    q, k, v = (t.cuda() for t in operands(torch.bfloat16, S))
    out, log = MULTIPLIED.forward(q, k, v, False, 0.5)
    later = slice(S // 2, S)
    rows = [t[:, :, later] for t in (torch.ones_like(out), q)]
    given = (*rows, k, v, out[:, :, later], log[:, :, later], False, 0.5)
    expected, found = MULTIPLIED.backward(*given), GPU_FLASH.backward(*given)
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other.double()).norm() / other.double().norm()) < 2e-2
