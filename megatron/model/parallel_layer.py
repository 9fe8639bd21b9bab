"""A layer whose attention and MLP read the same input: x + attention(norm(x)) + mlp(norm(x)).

GPT-J and Falcon have one norm for both branches, GPT-NeoX has a norm for each branch.

Shapes: b batch, s sequence, h hidden.
"""

from torch import Tensor

from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.model.transformer_layer import TransformerLayer


class ParallelLayer(TransformerLayer):
    """A ``TransformerLayer`` with parallel branches, which may share one norm."""

    def forward(self, x_bsh: Tensor, forward_pass: ForwardPass = PLAIN_PASS) -> Tensor:
        """See ``TransformerLayer``."""
        x = self._stream(x_bsh)
        normed = x.normed(self.input_layernorm)
        attended_bsh = (x + self._attention(normed, forward_pass)).total
        if self.block.mlp_has_norm:
            normed = x.normed_besides(self.pre_mlp_layernorm)
        return attended_bsh + self._mlp(normed, forward_pass)
