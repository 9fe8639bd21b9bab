"""The input layer: lookup in this rank's shard of the vocabulary (passes IF and IB)."""

import torch
from torch import Tensor, nn

from megatron.layers.main_grad import main_grad_of
from megatron.layers.vocabulary.shard import VocabularyShard, local_rows, rows_of


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
    def lookup(self, tokens_bs: Tensor) -> Tensor:
        """Return [b, s, h]: the embeddings of the tokens held here, zeros for the others (IF).

        The sum over all shards is the embedding, exactly: every token has one nonzero part.
        """
        row_bs, owned_bs = local_rows(tokens_bs, self.shard.first_row, self.shard.rows)
        return rows_of(self.weight, row_bs).mul_(owned_bs.unsqueeze(-1))

    @torch.no_grad()
    def add_gradient(self, tokens_bs: Tensor, gradient_bsh: Tensor) -> None:
        """Add the gradient of the embeddings held here to the weight's ``main_grad`` (IB)."""
        row_bs, owned_bs = local_rows(tokens_bs, self.shard.first_row, self.shard.rows)
        main_grad = main_grad_of(self.weight)
        part_bsh = gradient_bsh.to(main_grad.dtype, copy=True).mul_(owned_bs.unsqueeze(-1))
        main_grad.index_add_(0, row_bs.flatten(), part_bsh.flatten(0, 1))
