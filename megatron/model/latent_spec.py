"""Multi-latent attention of a model, as data that builds it."""

from dataclasses import dataclass, replace

from torch import nn

from megatron.kernels.scores import Scores
from megatron.layers.latent_attention import LatentAttention, LatentShape
from megatron.layers.site import Site
from megatron.model.norm_spec import NormSpec, norm_spec
from megatron.model.settings import ModelSettings


@dataclass(frozen=True)
class LatentSpec:
    """Multi-latent attention; see ``LatentAttention``.

    Attributes:
        shape: sizes.
        bias: a bias in the last projection.
        dropout: probability of dropping an attention weight.
        norm: norm of the latents; ``None``: no norm.
        scores: how products of queries and keys become scores.
    """

    shape: LatentShape
    bias: bool
    dropout: float
    norm: NormSpec | None
    scores: Scores

    def build(self, site: Site) -> nn.Module:
        """See ``PartSpec``."""
        norm = self.norm

        def norm_of(size: int) -> nn.Module | None:
            return None if norm is None else norm.build(size, site)

        return LatentAttention(
            self.shape,
            site,
            bias=self.bias,
            dropout=self.dropout,
            norm_of=norm_of,
            scores=self.scores,
        )


def latent_spec(config: ModelSettings, scores: Scores) -> LatentSpec:
    """Return the spec of a model's multi-latent attention.

    Args:
        config: the model.
        scores: how products of queries and keys become scores.
    """
    shape = LatentShape(
        config.hidden_size,
        config.attention.num_attention_heads,
        config.latent.q_lora_rank,
        config.latent.kv_lora_rank,
        config.latent.qk_head_dim,
        config.latent.qk_pos_emb_head_dim,
        config.latent.v_head_dim,
    )
    norm, epsilon = norm_spec(config), config.latent.latent_norm_epsilon
    if epsilon is not None:
        norm = replace(norm, epsilon=epsilon)
    return LatentSpec(
        shape,
        bias=config.block.add_bias_linear,
        dropout=config.attention.attention_dropout,
        norm=norm if config.attention.qk_layernorm else None,
        scores=scores,
    )
