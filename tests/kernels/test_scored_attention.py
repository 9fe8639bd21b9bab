"""What the reference's attention needs of memory."""

import pytest
import torch
from kernels.largest_result import LargestResult

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.reference import scored_attention
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.reference.scored_attention import BLOCK, FEWEST
from megatron.kernels.scores import Scores


def test_a_window_needs_memory_for_what_it_shows() -> None:
    """No result has an element for every pair of positions, forward or backward."""
    heads, seq_length, window = 2, 6 * BLOCK, 50
    q, k, v = (torch.randn(1, heads, seq_length, 4, requires_grad=True) for _ in range(3))
    scores = Scores(window=window, softcap=5.0, slopes_a=(0.5, 0.25))
    with LargestResult() as largest:
        output = ReferenceKernels().causal_attention(q, k, v, options=AttentionOptions(scores, 0.1))
        output.sum().backward()
    assert heads * BLOCK * window < largest.elements <= heads * BLOCK * (BLOCK + window)


def test_blocks_of_long_samples_are_short_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No result has more scores than are allowed, and no integer for every score."""
    heads, keys = 2, 700

    def gradients() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        q, k, v = (
            torch.randn(1, heads, length, 4, dtype=torch.float64, generator=generator)
            for length in (300, keys, keys)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        scores = Scores(window=650, slopes_a=(0.5, 0.25))
        out = scored_attention.scored_attention(q, k, v, AttentionOptions(scores))
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    whole = gradients()
    monkeypatch.setattr(scored_attention, "ON_A_CPU", heads * FEWEST * keys)
    with LargestResult() as largest, LargestResult(torch.int64) as integers:
        found = gradients()
    assert heads * FEWEST * 600 < largest.elements <= heads * FEWEST * keys
    assert integers.elements <= keys
    for own, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


def test_nothing_but_the_operands_is_kept_for_the_backward() -> None:
    q, k, v = (torch.randn(1, 2, 700, 4, requires_grad=True) for _ in range(3))
    kept: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ReferenceKernels().causal_attention(
            q, k, v, options=AttentionOptions(Scores(softcap=5.0), 0.1)
        )
    assert kept == [q.shape, k.shape, v.shape]
