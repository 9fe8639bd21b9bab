"""What PyTorch's operations promise besides their values."""

import pytest
import torch
from kernels.formulas import explicit_attention
from kernels.largest_result import LargestResult

from megatron.kernels.reference import kernels as reference
from megatron.kernels.scores import Scores
from megatron.kernels.tiled import tiles


def test_pytorch_needs_little_memory_for_exponentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile is as large as a GPU likes it; what of it is in fp32 at a time is not."""
    monkeypatch.setattr(tiles, "EXPONENTIALS_AT_ONCE", 200)
    torch.manual_seed(0)
    logits_tn = (10 * torch.randn(101, 64)).bfloat16()
    exact, max_n, sum_n = logits_tn.double(), torch.full((64,), -torch.inf), torch.zeros(64)
    with LargestResult(torch.float32) as largest:
        reference.ReferenceKernels().exponentials_(logits_tn, max_n, sum_n)
    assert 64 < largest.elements <= 200
    expected = (exact - exact.amax(0)).exp()
    torch.testing.assert_close(logits_tn.double(), expected, rtol=2**-8, atol=1e-37)
    torch.testing.assert_close(sum_n.double(), expected.sum(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("queries", [1, 5, 9])
def test_pytorchs_kernel_sees_queries_of_the_last_positions_where_they_are(queries: int) -> None:
    """On a CPU the reference does not ask it for them; on CUDA it does."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 9, 4, generator=generator) for heads in (4, 2, 2))
    found = reference.scaled_dot_product(q[:, :, -queries:], k, v, 0.0, 0.7)
    expected = explicit_attention(q, k, v, scores=Scores(0.7))[:, :, -queries:]
    torch.testing.assert_close(found, expected)
