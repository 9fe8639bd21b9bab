"""The input layer: lookup in this rank's shard of the vocabulary (passes IF and IB)."""

import torch
from torch import Tensor, nn

from megatron.kernels.face import Kernels
from megatron.kernels.rows import local_rows, rows_of
from megatron.layers.main_grad import main_grad_of
from megatron.layers.vocabulary.shard import VocabularyShard


class InputLayer(nn.Module):
    """Word embedding of one vocabulary shard.

    Args:
        shard: which rows this rank holds.
        hidden_size: h.
        kernels: of ``device`` and ``dtype``.
        dtype: of the weight and the embeddings.
        device: of the weight.
        weight: [rows, h], if the layer shares the weight of another layer.
    """

    def __init__(
        self,
        shard: VocabularyShard,
        hidden_size: int,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.shard = shard
        self._kernels = kernels
        if weight is None:
            weight = nn.Parameter(torch.empty(shard.rows, hidden_size, dtype=dtype, device=device))
        self.weight = weight

    @torch.no_grad()
    def lookup(self, tokens_n: Tensor) -> Tensor:
        """IF: return [n, h], the embeddings of tokens in this shard, and zeros for the others.

        The sum over all shards is exactly the embedding, because each token is in one shard.
        """
        return lookup_rows(self.weight, tokens_n, self.shard)

    @torch.no_grad()
    def add_gradient(self, tokens_n: Tensor, gradient_nh: Tensor) -> None:
        """IB: add the gradient of this shard's embeddings to the weight's ``main_grad``."""
        total_vh = main_grad_of(self.weight)
        self._kernels.add_rows_(total_vh, tokens_n, gradient_nh, self.shard.first_row)


def lookup_rows(weight_vh: Tensor, tokens_n: Tensor, shard: VocabularyShard) -> Tensor:
    """Return [n, h]: the rows of the tokens in ``shard``, zeros for the others."""
    row_n, owned_n = local_rows(tokens_n, shard.first_row, shard.rows)
    return rows_of(weight_vh, row_n).mul_(owned_n.unsqueeze(-1))
