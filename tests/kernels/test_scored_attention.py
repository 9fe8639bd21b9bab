"""What the reference's attention with a window needs of memory."""

import torch
from kernels.largest_result import LargestResult

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.reference.scored_attention import BLOCK
from megatron.kernels.scores import Scores


def test_a_window_needs_memory_for_what_it_shows() -> None:
    """No result has an element for every pair of positions, forward or backward."""
    heads, seq_length, window = 2, 6 * BLOCK, 50
    q, k, v = (torch.randn(1, heads, seq_length, 4, requires_grad=True) for _ in range(3))
    scores = Scores(window=window, softcap=5.0, slopes_a=(0.5, 0.25))
    with LargestResult() as largest:
        output = ReferenceKernels().causal_attention(q, k, v, dropout=0.1, scores=scores)
        output.sum().backward()
    assert heads * BLOCK * window < largest.elements <= heads * BLOCK * (BLOCK + window)


def test_nothing_but_the_operands_is_kept_for_the_backward() -> None:
    q, k, v = (torch.randn(1, 2, 700, 4, requires_grad=True) for _ in range(3))
    kept: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ReferenceKernels().causal_attention(q, k, v, dropout=0.1, scores=Scores(softcap=5.0))
    assert kept == [q.shape, k.shape, v.shape]
