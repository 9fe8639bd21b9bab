"""Causal self-attention with one fused projection for queries, keys and values.

Shapes: b batch, s sequence, h hidden, g query groups (key/value heads), r query heads per group,
a = g r query heads, d channels of a head, c = r + 2: the queries, the key and the value of a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.heads import alone, is_view, split_heads
from megatron.kernels.scores import PLAIN, Scores
from megatron.layers.attend import attend
from megatron.layers.attention_call import Heads
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.heads_norm import HeadsNorm
from megatron.layers.linear import Linear, LinearInput
from megatron.layers.products import whole_of
from megatron.layers.recompute import again
from megatron.layers.rope import RotaryEmbedding
from megatron.layers.settings import AttentionSettings, NormSettings
from megatron.layers.site import Site
from megatron.layers.tensor_cut import Cut, Holding, Whole


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a self-attention layer.

    Attributes:
        num_heads: query heads a.
        num_groups: key/value heads g; equal to ``num_heads`` without grouped-query attention.
        head_size: channels d of a head; the product a d may differ from h.
    """

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
        """Return the sizes on one of ``ranks`` ranks; each has whole groups of heads."""
        assert self.num_groups % ranks == 0, f"{self.num_groups} groups for {ranks} ranks"
        return replace(self, num_heads=self.num_heads // ranks, num_groups=self.num_groups // ranks)


class SelfAttention(nn.Module):
    """Multi-head or grouped-query causal attention.

    The rows of ``linear_qkv.weight`` [g (r + 2) d, h] follow Megatron's checkpoints: for every
    group its r query heads, then its key, then its value. Weights are unset until
    ``megatron.model.init`` draws them.

    Each tensor-parallel rank has whole groups of heads. Each context-parallel rank has some tokens
    of every sequence, and the input holds only these tokens.

    Args:
        settings: of the attention; its values are final.
        hidden_size: h.
        site: device, dtype, ranks and kernels of the layer.
        bias: biases in both projections.
        norm: builds the norms of queries and keys [b, s, heads, d], which come before or after
            the rotation: over d, or over all heads too (``HeadsNorm``).
        scores: how products of queries and keys become scores.

    Attributes:
        shape: sizes of this rank's share.
        holdings: how the ranks hold the parameters; see ``SaysHoldings``.
    """

    def __init__(
        self,
        settings: AttentionSettings,
        hidden_size: int,
        site: Site,
        *,
        bias: bool,
        norm: NormSettings,
        scores: Scores = PLAIN,
    ) -> None:
        super().__init__()
        shape = AttentionShape(
            settings.num_attention_heads, settings.num_query_groups, settings.kv_channels
        )
        self.shape = shape.share(site.tensor.size)
        self._site = site
        self.dropout = settings.attention_dropout
        own_heads = self.shape.num_heads
        self.scores = scores.of_heads(site.tensor.rank * own_heads, own_heads)
        query_size = shape.num_heads * shape.head_size
        self.linear_qkv = Linear(
            hidden_size,
            query_size + 2 * shape.num_groups * shape.head_size,
            site,
            bias=bias or settings.add_qkv_bias,
            parallel="columns",
        )
        self.linear_proj = Linear(
            query_size,
            hidden_size,
            site,
            bias=bias or settings.add_proj_bias,
            parallel="rows",
        )
        self._turns_first = settings.qk_layernorm_after_rotation
        self.q_layernorm = _norm_of_heads(settings, norm, shape.num_heads, site)
        self.k_layernorm = _norm_of_heads(settings, norm, shape.num_groups, site)
        self.holdings: Mapping[str, Holding] = {
            name: Whole(for_own_heads=True)
            for name, _ in self.named_parameters()
            if name.startswith(("q_layernorm.", "k_layernorm."))
            and not isinstance(self.q_layernorm, HeadsNorm)
        }
        self._sinks = settings.softmax_type
        self.softmax_offset: nn.Parameter | None = None
        if self._sinks == "learnable":
            offset_a = torch.empty(own_heads, dtype=site.dtype, device=site.device)
            self.softmax_offset = nn.Parameter(offset_a)
            if site.tensor.size > 1:
                self.holdings = {**self.holdings, "softmax_offset": Cut(0)}

    @property
    def reader(self) -> Linear:
        """The linear layer that reads the input; nothing else reads it."""
        return self.linear_qkv

    def forward(self, x_bsh: LinearInput, forward_pass: ForwardPass = PLAIN_PASS) -> Tensor:
        """Let every position attend to itself and to earlier positions.

        Args:
            x_bsh: input [b, s, h], of the tokens that this rank has.
            forward_pass: the data of the pass for this layer, such as rotation and documents.

        Returns:
            The attention's output after its projection, [b, s, h].
        """
        shape = self.shape
        qkv_bsi = self.linear_qkv(x_bsh)
        qkv_bsgcd = qkv_bsi.view(
            *qkv_bsi.shape[:2], shape.num_groups, shape.heads_per_group + 2, shape.head_size
        )
        if "core_attn" in self._site.recomputation.parts:
            return self.linear_proj(again(self._whole_core, qkv_bsgcd, forward_pass))
        return self.linear_proj(self.linear_proj.joined(self._core(qkv_bsgcd, forward_pass)))

    def _whole_core(self, qkv_bsgcd: Tensor, forward_pass: ForwardPass) -> Tensor:
        """Compute attention between the two projections; return [b, s, a d]."""
        return whole_of(self._core(qkv_bsgcd, forward_pass))

    def _core(self, qkv_bsgcd: Tensor, forward_pass: ForwardPass) -> tuple[Tensor, ...]:
        """As ``_whole_core``, in parts of consecutive tokens."""
        rope, kernels = forward_pass.rope, self._site.kernels
        options = AttentionOptions(
            self.scores, self._begin_dropout(forward_pass), forward_pass.documents, self.sinks()
        )
        is_whole = self._site.context.size == 1 and forward_pass.sliced is None
        if is_whole and self.q_layernorm is None and rope is None:
            return (kernels.causal_self_attention(qkv_bsgcd, options=options),)
        parts_buad = attend(
            self._site,
            forward_pass,
            self._turned_heads(qkv_bsgcd, rope, attends_to_copies=not is_whole),
            options,
        )
        return tuple(part_buad.flatten(2) for part_buad in parts_buad)

    def _turned_heads(
        self, qkv_bsgcd: Tensor, rope: RotaryEmbedding | None, *, attends_to_copies: bool
    ) -> Heads:
        """Return queries, keys and values after their norms and rotation.

        Norms keep their inputs, and attention keeps these three. If the values were the only view
        of ``qkv_bsgcd`` among the kept tensors, they would keep its queries and keys in vain, so
        they are copied.

        Args:
            qkv_bsgcd: output of the projection.
            rope: the rotation, if there is one.
            attends_to_copies: whether attention copies keys and values anyway.
        """
        q_bsad, k_bsgd, v_bsgd = split_heads(qkv_bsgcd)
        keeps_view = rope is None
        if self.q_layernorm is not None and not (self._turns_first and rope is not None):
            keeps_view = is_view(q_bsad) and not isinstance(self.q_layernorm, HeadsNorm)
            k_bsgd = k_bsgd if keeps_view else alone(k_bsgd)
        q_bsad, k_bsgd = self.turned(q_bsad, k_bsgd, rope)
        copies = not (keeps_view or attends_to_copies)
        return q_bsad, k_bsgd, alone(v_bsgd) if copies else v_bsgd

    def turned(
        self, q_bsad: Tensor, k_bsgd: Tensor, rope: RotaryEmbedding | None
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys after their norms and rotation, in the order of the settings.

        Args:
            q_bsad: queries of this rank's heads.
            k_bsgd: keys.
            rope: the rotation, if there is one.
        """
        if rope is not None and self._turns_first:
            q_bsad, k_bsgd = rope(q_bsad), rope(k_bsgd)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q_bsad, k_bsgd = self.q_layernorm(q_bsad), self.k_layernorm(k_bsgd)
        if rope is not None and not self._turns_first:
            q_bsad, k_bsgd = rope(q_bsad), rope(k_bsgd)
        return q_bsad, k_bsgd

    def sinks(self) -> Tensor | None:
        """Return the scores of the key without a value for this rank's heads, [a], if any."""
        if self._sinks == "off-by-one":
            return self.linear_qkv.weight.new_zeros(self.shape.num_heads)
        return self.softmax_offset

    def _begin_dropout(self, forward_pass: ForwardPass) -> float:
        """Seed the dropout of this rank's heads and tokens, and return its probability."""
        if forward_pass.seeds is None or not self.dropout:
            return 0.0
        forward_pass.seeds.begin_attention(self._site)
        return self.dropout


def _norm_of_heads(
    settings: AttentionSettings, norm: NormSettings, heads: int, site: Site
) -> nn.Module | None:
    """Return the norm of queries, or of keys, of all ranks' ``heads``; ``None``: there is none."""
    if not settings.qk_layernorm:
        return None
    if settings.qk_layernorm_across_heads:
        return norm.across(heads * settings.kv_channels, site)
    return norm.build(settings.kv_channels, site)
