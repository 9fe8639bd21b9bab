"""Causal self-attention with one fused projection for queries, keys and values.

Shapes: b batch, s sequence, h hidden, g query groups (key/value heads), r query heads per group,
a = g r query heads, d channels of a head, c = r + 2: the queries, the key and the value of a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron.kernels.documents import Documents
from megatron.kernels.face import Kernels
from megatron.kernels.heads import split_heads
from megatron.kernels.scores import PLAIN, Scores
from megatron.layers.context_attention import context_attention
from megatron.layers.dropout import DropoutSeeds
from megatron.layers.linear import Linear
from megatron.layers.recompute import again
from megatron.layers.rope import RotaryEmbedding
from megatron.layers.tensor_cut import Holding, Whole
from megatron.parallel.context import WHOLE_SEQUENCES, ContextParallel
from megatron.parallel.tensor import ALONE, TensorParallel


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a self-attention layer.

    Attributes:
        hidden_size: h.
        num_heads: query heads a.
        num_groups: key/value heads g; equal to ``num_heads`` without grouped-query attention.
        head_size: channels d of a head; a d need not equal h.
    """

    hidden_size: int
    num_heads: int
    num_groups: int
    head_size: int

    def __post_init__(self) -> None:
        """Refuse groups of unequal size."""
        if self.num_groups < 1 or self.num_heads % self.num_groups:
            raise ValueError(
                f"{self.num_heads} attention heads cannot form {self.num_groups} query groups: "
                "the number of heads must be a multiple of the number of groups"
            )

    @property
    def heads_per_group(self) -> int:
        """Query heads r that share one key/value head."""
        return self.num_heads // self.num_groups

    def share(self, ranks: int) -> "AttentionShape":
        """Return the sizes on one of several ranks that share the heads, by whole groups."""
        assert self.num_groups % ranks == 0, f"{self.num_groups} groups for {ranks} ranks"
        return replace(self, num_heads=self.num_heads // ranks, num_groups=self.num_groups // ranks)


class SelfAttention(nn.Module):
    """Multi-head or grouped-query causal attention.

    The rows of ``linear_qkv.weight`` [g (r + 2) d, h] follow Megatron's checkpoints: for every
    group its r query heads, then its key, then its value. Weights are unset until
    ``megatron.model.init`` draws them.

    Tensor-parallel ranks share the heads, by whole groups. Context-parallel ranks share every
    sequence; here x has the tokens of one of them.

    Args:
        shape: sizes of the whole layer.
        bias: biases in both projections.
        qkv_bias: a bias in that of queries, keys and values, also without ``bias``.
        dropout: probability of dropping an attention weight in training.
        qk_norms: norms over d of the queries and of the keys, applied before the rotation.
        scores: how products of queries and keys become scores.
        device: where the parameters live.
        dtype: type of the parameters.
        kernels: of that device and type.
        tensor: the ranks that share the layer.
        context: the ranks that share every sequence.

    Attributes:
        shape: sizes of this rank's share.
        holdings: how the ranks hold the parameters; see ``SaysHoldings``.
        recompute_core_attn: the backward computes again what lies between the projections.
    """

    recompute_core_attn = False

    def __init__(
        self,
        shape: AttentionShape,
        *,
        bias: bool,
        qkv_bias: bool = False,
        dropout: float,
        qk_norms: tuple[nn.Module, nn.Module] | None,
        scores: Scores = PLAIN,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
        tensor: TensorParallel = ALONE,
        context: ContextParallel = WHOLE_SEQUENCES,
    ) -> None:
        super().__init__()
        self.shape = shape.share(tensor.size)
        self._tensor = tensor
        self._context = context
        self.dropout = dropout
        own_heads = self.shape.num_heads
        self.scores = scores.of_heads(tensor.rank * own_heads, own_heads)
        self._kernels = kernels
        query_size = shape.num_heads * shape.head_size
        self.linear_qkv = Linear(
            shape.hidden_size,
            query_size + 2 * shape.num_groups * shape.head_size,
            bias=bias or qkv_bias,
            device=device,
            dtype=dtype,
            kernels=kernels,
            columns=tensor,
        )
        self.linear_proj = Linear(
            query_size,
            shape.hidden_size,
            bias=bias,
            device=device,
            dtype=dtype,
            kernels=kernels,
            rows=tensor,
        )
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if qk_norms is not None:
            self.q_layernorm, self.k_layernorm = qk_norms
        self.holdings: Mapping[str, Holding] = {
            name: Whole(for_own_heads=True)
            for name, _ in self.named_parameters()
            if name.startswith(("q_layernorm.", "k_layernorm."))
        }

    @property
    def reader(self) -> Linear:
        """What reads the input; nothing else does."""
        return self.linear_qkv

    def forward(
        self,
        x_bsh: Tensor,
        rope: RotaryEmbedding | None = None,
        seeds: DropoutSeeds | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Let every position attend to itself and to earlier positions.

        Args:
            x_bsh: input [b, s, h], of the tokens that this rank has.
            rope: rotation of these tokens, or None for no rotation.
            seeds: of dropout in training; ``None``: nothing is dropped.
            documents: of whole samples, none of which sees another; ``None``: positions see all
                earlier ones.

        Returns:
            The attention's output after its projection, [b, s, h].
        """
        shape = self.shape
        qkv_bsgcd = self.linear_qkv(x_bsh).unflatten(
            2, (shape.num_groups, shape.heads_per_group + 2, shape.head_size)
        )
        if self.recompute_core_attn:
            return self.linear_proj(again(self._core, qkv_bsgcd, rope, seeds, documents))
        return self.linear_proj(self._core(qkv_bsgcd, rope, seeds, documents))

    def _core(
        self,
        qkv_bsgcd: Tensor,
        rope: RotaryEmbedding | None,
        seeds: DropoutSeeds | None,
        documents: Documents | None,
    ) -> Tensor:
        """Return what lies between the two projections, [b, s, a d]."""
        dropout = self.dropout if seeds is not None else 0.0
        if seeds is not None and dropout:
            seeds.begin("attention", self._context.rank * self._tensor.size + self._tensor.rank)
        is_whole = self._context.size == 1
        if is_whole and self.q_layernorm is None and rope is None:
            return self._kernels.causal_self_attention(
                qkv_bsgcd, dropout=dropout, scores=self.scores, documents=documents
            )
        q_bsad, k_bsgd, v_bsgd = split_heads(qkv_bsgcd)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q_bsad, k_bsgd = self.q_layernorm(q_bsad), self.k_layernorm(k_bsgd)
        if rope is not None:
            q_bsad, k_bsgd = rope(q_bsad), rope(k_bsgd)
        if not is_whole:
            return context_attention(
                self._kernels,
                self._context,
                q_bsad,
                k_bsgd,
                v_bsgd,
                dropout=dropout,
                scores=self.scores,
                documents=documents,
            ).flatten(2)
        context_basd = self._kernels.causal_attention(
            q_bsad.transpose(1, 2),
            k_bsgd.transpose(1, 2),
            v_bsgd.transpose(1, 2),
            dropout=dropout,
            scores=self.scores,
            documents=documents,
        )
        return context_basd.transpose(1, 2).flatten(2)
