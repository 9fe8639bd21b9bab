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

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron.kernels.scores import PLAIN, Scores
from megatron.layers.attend import attend
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.gathered import gathered
from megatron.layers.linear import Linear
from megatron.layers.products import whole_of
from megatron.layers.recompute import again, all_forgotten
from megatron.layers.site import Site


@dataclass(frozen=True)
class LatentShape:
    """Sizes of multi-latent attention.

    Attributes:
        hidden_size: h.
        num_heads: a.
        query_rank: width of a query's latent; ``None``: queries are one product of the input.
        latent_rank: width of the latent of keys and values.
        plain_size: channels n of a query or key that do not turn.
        turned_size: channels r that do.
        value_size: channels e of a value.
    """

    hidden_size: int
    num_heads: int
    query_rank: int | None
    latent_rank: int
    plain_size: int
    turned_size: int
    value_size: int

    @property
    def head_size(self) -> int:
        """Channels d of a query or key."""
        return self.plain_size + self.turned_size

    @property
    def width(self) -> int:
        """Channels w of queries, keys and values in the kernels."""
        return max(self.head_size, self.value_size)


class LatentAttention(nn.Module):
    """Multi-latent causal attention; weights are unset until ``megatron.model.init`` draws them.

    Args:
        shape: sizes of the whole layer.
        site: device, dtype, ranks and kernels of the layer.
        bias: a bias in the last projection.
        dropout: probability of dropping an attention weight in training.
        norm_of: returns a norm of latents of a given width, or ``None``: there is no norm.
        scores: how products of queries and keys become scores; they have no slopes.

    Attributes:
        shape: sizes of this rank's share: its own heads.
    """

    def __init__(
        self,
        shape: LatentShape,
        site: Site,
        *,
        bias: bool,
        dropout: float,
        norm_of: Callable[[int], nn.Module | None],
        scores: Scores = PLAIN,
    ) -> None:
        super().__init__()
        assert shape.num_heads % site.tensor.size == 0, (shape.num_heads, site.tensor.size)
        assert not scores.slopes_a, "positions are those of the rotation"
        self.shape = replace(shape, num_heads=shape.num_heads // site.tensor.size)
        self._site, self.dropout = site, dropout
        self.scores = replace(scores, scale=scores.scale_of(shape.head_size))
        if scores.scale is None and shape.width == shape.head_size:
            self.scores = scores  # as the quickest kernels want it
        h, a, rank = shape.hidden_size, shape.num_heads, shape.query_rank
        queries = a * shape.head_size
        self.q_layernorm: nn.Module | None = None
        if rank is None:
            self.linear_q_proj = Linear(h, queries, site, bias=False, parallel="columns")
        else:
            self.linear_q_down_proj = Linear(h, rank, site, bias=False)
            self.q_layernorm = norm_of(rank)
            self.linear_q_up_proj = Linear(rank, queries, site, bias=False, parallel="columns")
        down, up = shape.latent_rank + shape.turned_size, shape.plain_size + shape.value_size
        self.linear_kv_down_proj = Linear(h, down, site, bias=False)
        self.kv_layernorm = norm_of(shape.latent_rank)
        self.linear_kv_up_proj = Linear(
            shape.latent_rank, a * up, site, bias=False, parallel="columns"
        )
        self.linear_proj = Linear(a * shape.value_size, h, site, bias=bias, parallel="rows")

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
        if self.shape.query_rank is not None:
            query = self.linear_q_down_proj(x_buh)
            if self.q_layernorm is not None:
                query = self.q_layernorm(query)
        sizes = [self.shape.latent_rank, self.shape.turned_size]
        latent, turned_bur = self.linear_kv_down_proj(x_buh).split(sizes, -1)
        latent = latent.contiguous() if self.kv_layernorm is None else self.kv_layernorm(latent)
        return query, latent, turned_bur

    def heads(
        self, query: Tensor, latent: Tensor, turned_bur: Tensor, forward_pass: ForwardPass
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank's heads, each [b, s, a, w]."""
        shape, rope = self.shape, forward_pass.rope
        is_direct = shape.query_rank is None
        up = self.linear_q_proj if is_direct else self.linear_q_up_proj
        q_bsad = up(query).unflatten(-1, (-1, shape.head_size))
        kv_bsaf = self.linear_kv_up_proj(latent).unflatten(-1, (shape.num_heads, -1))
        k_bsan, v_bsae = kv_bsaf.split([shape.plain_size, shape.value_size], -1)
        turned_bs1r = gathered(turned_bur, self._site.tensor).unsqueeze(2)
        if rope is not None:
            q_bsan, q_bsar = q_bsad.split([shape.plain_size, shape.turned_size], -1)
            q_bsad = torch.cat((q_bsan, rope(q_bsar)), -1)
            turned_bs1r = rope(turned_bs1r)
        k_bsad = torch.cat((k_bsan, turned_bs1r.expand(-1, -1, shape.num_heads, -1)), -1)
        return (
            _filled(q_bsad, shape.width),
            _filled(k_bsad, shape.width),
            _filled(v_bsae, shape.width).contiguous(),  # frees the tensor that k is in too
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
        parts_buaw = attend(
            self._site,
            forward_pass,
            (q_bsaw, k_bsaw, v_bsaw),
            dropout=self._begin_dropout(forward_pass),
            scores=self.scores,
        )
        return tuple(part_buaw[..., : self.shape.value_size].flatten(2) for part_buaw in parts_buaw)

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
