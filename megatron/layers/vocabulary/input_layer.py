"""The input layer: lookup in this rank's shard of the vocabulary (passes IF and IB)."""

import torch
from torch import Tensor, nn

from megatron.kernels.rows import local_rows, rows_of
from megatron.layers.main_grad import main_grad_of
from megatron.layers.vocabulary.shard import VocabularyShard


class InputLayer(nn.Module):
    """Word embedding of one vocabulary shard.

    Args:
        shard: which rows this rank holds.
        hidden_size: h.
        dtype: of the weight and the embeddings.
        device: of the weight.
    """

    def __init__(
        self, shard: VocabularyShard, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.shard = shard
        self.weight = nn.Parameter(torch.empty(shard.rows, hidden_size, dtype=dtype, device=device))

    @torch.no_grad()
    def lookup(self, tokens_n: Tensor) -> Tensor:
        """Return [n, h]: the embeddings of the tokens held here, zeros for the others (IF).

        The sum over all shards is the embedding, exactly: every token has one nonzero part.
        """
        row_n, owned_n = local_rows(tokens_n, self.shard.first_row, self.shard.rows)
        return rows_of(self.weight, row_n).mul_(owned_n.unsqueeze(-1))

    @torch.no_grad()
    def add_gradient(self, tokens_n: Tensor, gradient_nh: Tensor) -> None:
        """Add the gradient of the embeddings held here to the weight's ``main_grad`` (IB)."""
        row_n, owned_n = local_rows(tokens_n, self.shard.first_row, self.shard.rows)
        main_grad = main_grad_of(self.weight)
        part_nh = gradient_nh.to(main_grad.dtype, copy=True).mul_(owned_n.unsqueeze(-1))
        main_grad.index_add_(0, row_n, part_nh)
