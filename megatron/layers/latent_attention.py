"""Multi-latent attention (arXiv 2405.04434, section 2.1; 2412.19437, section 2.1.1).

    query   = up(norm(down(x))), or one product of x (without --q-lora-rank)
    key     = up(norm(latent)) beside a rotated part that all heads share
    value   = up(norm(latent))

``down`` gives a token one narrow vector, its *latent*; ``up`` forms the heads from it. Only a part
of each query and key is rotated, neighbouring channels together. Values may be narrower than keys.
The kernels want equal widths, so the narrower ones are filled up with zeros, which changes no
result.

The layers down are whole on every tensor-parallel rank, for the tokens that the rank has outside
of attention. The layers up are cut by heads. Names and rows are those of Megatron-Core.

Shapes: b batch, s tokens of a sequence, u tokens of it that a rank has outside of attention, h
hidden, a heads, n channels of a head that do not turn, r channels that do, d = n + r, e channels of
a value, w = max(d, e).
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.scores import PLAIN, Scores
from megatron.layers.attend import attend
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.gathered import gathered
from megatron.layers.linear import Linear
from megatron.layers.products import whole_of
from megatron.layers.recompute import again, all_forgotten
from megatron.layers.settings import AttentionSettings, LatentAttentionSettings, NormSettings
from megatron.layers.site import Site


class LatentAttention(nn.Module):
    """Multi-latent causal attention; weights are unset until ``megatron.model.init`` draws them.

    Args:
        settings: widths of the latents, and channels of the heads.
        attention: number of heads, dropout, and whether latents are normalised.
        hidden_size: h.
        site: device, dtype, ranks and kernels of the layer.
        bias: a bias in the last projection.
        norm: builds the norms of latents.
        scores: how products of queries and keys become scores; they have no slopes.

    Attributes:
        num_heads: heads of this rank.
    """

    def __init__(
        self,
        settings: LatentAttentionSettings,
        attention: AttentionSettings,
        hidden_size: int,
        site: Site,
        *,
        bias: bool,
        norm: NormSettings,
        scores: Scores = PLAIN,
    ) -> None:
        super().__init__()
        h, a, rank = hidden_size, attention.num_attention_heads, settings.q_lora_rank
        assert a % site.tensor.size == 0, (a, site.tensor.size)
        assert not scores.slopes_a, "positions are those of the rotation"
        self.num_heads = a // site.tensor.size
        self.settings, self._site = settings, site
        self.dropout = attention.attention_dropout
        self.scores = replace(scores, scale=scores.scale_of(settings.query_channels))
        if scores.scale is None and settings.width == settings.query_channels:
            self.scores = scores  # as the quickest kernels want it

        if settings.latent_norm_epsilon is not None:
            norm = replace(norm, norm_epsilon=settings.latent_norm_epsilon)

        def norm_of(size: int) -> nn.Module | None:
            return norm.build(size, site) if attention.qk_layernorm else None

        queries = a * settings.query_channels
        self.q_layernorm: nn.Module | None = None
        if rank is None:
            self.linear_q_proj = Linear(h, queries, site, bias=False, parallel="columns")
        else:
            self.linear_q_down_proj = Linear(h, rank, site, bias=False)
            self.q_layernorm = norm_of(rank)
            self.linear_q_up_proj = Linear(rank, queries, site, bias=False, parallel="columns")
        latent, turned = settings.kv_lora_rank, settings.qk_pos_emb_head_dim
        self.linear_kv_down_proj = Linear(h, latent + turned, site, bias=False)
        self.kv_layernorm = norm_of(latent)
        up = a * (settings.qk_head_dim + settings.v_head_dim)
        self.linear_kv_up_proj = Linear(latent, up, site, bias=False, parallel="columns")
        values = a * settings.v_head_dim
        self.linear_proj = Linear(values, h, site, bias=bias, parallel="rows")

    def forward(self, x_buh: Tensor, forward_pass: ForwardPass = PLAIN_PASS) -> Tensor:
        """Let every position attend to itself and to earlier positions.

        Args:
            x_buh: input [b, u, h], of the tokens that this rank has.
            forward_pass: the data of the pass for this layer, such as rotation and documents.

        Returns:
            The attention's output after its projection, [b, u, h].
        """
        latents = self.latents(x_buh)
        parts = self._site.recomputation.parts
        if "mla_up_proj" not in parts:
            heads = self.heads(*latents, forward_pass)
            if "core_attn" in parts:
                return self.linear_proj(again(self._attend_whole, *heads, forward_pass))
            return self.linear_proj(self.linear_proj.joined(self._attend(*heads, forward_pass)))
        if "core_attn" in parts:
            return self.linear_proj(again(self._attend_to, *latents, forward_pass))
        heads = self.heads(*latents, forward_pass)
        query, latent, turned_bur = (each.detach() for each in latents)
        with all_forgotten(lambda: self.heads(query, latent, turned_bur, forward_pass), heads):
            parts_buf = self._attend(*heads, forward_pass)
        return self.linear_proj(self.linear_proj.joined(parts_buf))

    def latents(self, x_buh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the up projections, for the tokens that this rank has.

        Returns:
            The input of the queries' layer [b, u, ...], the latent of keys and values
            [b, u, ...], and the shared part of keys [b, u, r], not yet rotated.
        """
        query = x_buh
        if self.settings.q_lora_rank is not None:
            query = self.linear_q_down_proj(x_buh)
            if self.q_layernorm is not None:
                query = self.q_layernorm(query)
        sizes = [self.settings.kv_lora_rank, self.settings.qk_pos_emb_head_dim]
        latent, turned_bur = self.linear_kv_down_proj(x_buh).split(sizes, -1)
        latent = latent.contiguous() if self.kv_layernorm is None else self.kv_layernorm(latent)
        return query, latent, turned_bur

    def heads(
        self, query: Tensor, latent: Tensor, turned_bur: Tensor, forward_pass: ForwardPass
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank's heads, each [b, s, a, w]."""
        rope, width = forward_pass.rope, self.settings.width
        turned, plain = self.settings.qk_pos_emb_head_dim, self.settings.qk_head_dim
        is_direct = self.settings.q_lora_rank is None
        up = self.linear_q_proj if is_direct else self.linear_q_up_proj
        q_bsad = up(query).unflatten(-1, (-1, plain + turned))
        kv_bsaf = self.linear_kv_up_proj(latent).unflatten(-1, (self.num_heads, -1))
        k_bsan, v_bsae = kv_bsaf.split([plain, self.settings.v_head_dim], -1)
        turned_bs1r = gathered(turned_bur, self._site.tensor).unsqueeze(2)
        if rope is not None:
            q_bsan, q_bsar = q_bsad.split([plain, turned], -1)
            q_bsad = torch.cat((q_bsan, rope(q_bsar)), -1)
            # Turned once, before every head gets a copy.
            turned_bs1r = rope(turned_bs1r)
        k_bsad = torch.cat((k_bsan, turned_bs1r.expand(-1, -1, self.num_heads, -1)), -1)
        return (
            _filled(q_bsad, width),
            _filled(k_bsad, width),
            _filled(v_bsae, width).contiguous(),  # frees the tensor that k is in too
        )

    def _attend_to(
        self, query: Tensor, latent: Tensor, turned_bur: Tensor, forward_pass: ForwardPass
    ) -> Tensor:
        """Compute attention from the latents; return [b, s, a e]."""
        heads = self.heads(query, latent, turned_bur, forward_pass)
        return self._attend_whole(*heads, forward_pass)

    def _attend_whole(
        self, q_bsaw: Tensor, k_bsaw: Tensor, v_bsaw: Tensor, forward_pass: ForwardPass
    ) -> Tensor:
        """Compute attention of this rank's heads; return [b, s, a e]."""
        return whole_of(self._attend(q_bsaw, k_bsaw, v_bsaw, forward_pass))

    def _attend(
        self, q_bsaw: Tensor, k_bsaw: Tensor, v_bsaw: Tensor, forward_pass: ForwardPass
    ) -> tuple[Tensor, ...]:
        """As ``_attend_whole``, in parts of consecutive tokens."""
        options = AttentionOptions(
            self.scores, self._begin_dropout(forward_pass), forward_pass.documents
        )
        parts_buaw = attend(self._site, forward_pass, (q_bsaw, k_bsaw, v_bsaw), options)
        values = self.settings.v_head_dim
        # The channels behind are the zeros that fill up the values.
        return tuple(part_buaw[..., :values].flatten(2) for part_buaw in parts_buaw)

    def _begin_dropout(self, forward_pass: ForwardPass) -> float:
        """Seed the dropout of this rank's heads and tokens, and return its probability."""
        if forward_pass.seeds is None or not self.dropout:
            return 0.0
        forward_pass.seeds.begin_attention(self._site)
        return self.dropout


def _filled(x: Tensor, width: int) -> Tensor:
    """Return a tensor with zeros behind its last dimension, up to ``width``."""
    lacking = width - x.shape[-1]
    return functional.pad(x, (0, lacking)) if lacking else x
