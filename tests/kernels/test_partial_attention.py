"""Parts of attention, put together, are attention; every kernel agrees with the specification."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron.kernels.cpu.kernels import CpuKernels
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.reference.partial_attention import Attended, AttentionPart

B, HEADS, GROUPS, S, Z, D = 2, 4, 2, 6, 10, 8
KERNELS = [ReferenceKernels(), CpuKernels()]
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
@pytest.mark.parametrize("kernels", KERNELS, ids=lambda own: type(own).__name__)
def test_one_part_is_attention(kernels: Kernels, dtype: torch.dtype, causal: bool) -> None:
    given = operands(dtype, S if causal else Z)
    wide = [t.double().clone().requires_grad_() for t in given]
    grad = torch.randn(B, HEADS, S, D, dtype=torch.float64)
    expected = written_out(wide, 0.5, causal=causal)
    gradients = torch.autograd.grad(expected, wide, grad.to(dtype).double())
    part = AttentionPart(*given, causal, 0.5)
    attended = kernels.attend_to_part(part)
    found = kernels.gradients_of_part(part, attended, grad.to(dtype))
    for one, other in zip(
        (attended.out_basd, *found), (expected.detach(), *gradients), strict=True
    ):
        assert one.dtype == dtype
        error = (one.double() - other).norm() / other.norm()
        assert float(error) < BOUNDS[dtype]


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda own: type(own).__name__)
def test_two_parts_make_a_whole(kernels: Kernels) -> None:
    q, k, v = operands(torch.float64, Z)
    cuts = slice(0, 3), slice(3, Z)
    parts = [AttentionPart(q, k[:, :, cut], v[:, :, cut], False, 0.5) for cut in cuts]
    (first, first_log), (second, second_log) = map(kernels.attend_to_part, parts)
    log = torch.logaddexp(first_log, second_log)
    out = (first_log - log).exp().unsqueeze(-1) * first
    out += (second_log - log).exp().unsqueeze(-1) * second
    wide = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = written_out(wide, 0.5, causal=False)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-12)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, wide, grad)
    both = [kernels.gradients_of_part(part, Attended(out, log), grad) for part in parts]
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
    on_gpu, later = ReferenceKernels(), slice(S // 2, S)
    whole = on_gpu.attend_to_part(AttentionPart(q, k, v, False, 0.5))
    part = AttentionPart(q[:, :, later], k, v, False, 0.5)
    of_part = Attended(*(t[:, :, later] for t in whole))
    grad = torch.ones_like(of_part.out_basd)
    found = on_gpu.gradients_of_part(part, of_part, grad)
    on_host = AttentionPart(part.q_basd.cpu(), k.cpu(), v.cpu(), False, 0.5)
    expected = on_gpu.gradients_of_part(on_host, Attended(*(t.cpu() for t in of_part)), grad.cpu())
    for one, other in zip(found, expected, strict=True):
        assert float((one.cpu().double() - other.double()).norm() / other.double().norm()) < 2e-2
