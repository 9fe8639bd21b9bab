"""A layer whose attention and MLP read the same input: x + attention(norm(x)) + mlp(norm(x)).

GPT-J and Falcon have one norm for both, GPT-NeoX one for each.

Shapes: b batch, s sequence, h hidden.
"""

from torch import Tensor

from megatron.layers.dropout import DropoutSeeds
from megatron.layers.rope import RotaryEmbedding
from megatron.model.transformer_layer import TransformerLayer


class ParallelLayer(TransformerLayer):
    """See ``TransformerLayer``, whose parameters it has, but for a norm that may be shared."""

    def forward(
        self,
        x_bsh: Tensor,
        rope: RotaryEmbedding | None = None,
        seeds: DropoutSeeds | None = None,
    ) -> Tensor:
        """See ``TransformerLayer``."""
        normed_bsh = self.input_layernorm(x_bsh)
        attended_bsh = self.post_self_attn_layernorm(self.self_attention(normed_bsh, rope, seeds))
        attended_bsh = self._drop(attended_bsh, seeds, "attention output")
        mlp_input_bsh = self.pre_mlp_layernorm(x_bsh) if self.spec.mlp_norm else normed_bsh
        mlp_bsh = self.post_mlp_layernorm(self.mlp(mlp_input_bsh))
        mlp_bsh = self._drop(mlp_bsh, seeds, "mlp output")
        return self._stream(x_bsh, normed_bsh) + attended_bsh + mlp_bsh
