"""A layer whose attention and MLP read the same input: x + attention(norm(x)) + mlp(norm(x)).

GPT-J and Falcon have one norm for both, GPT-NeoX one for each.

Shapes: b batch, s sequence, h hidden.
"""

from torch import Tensor

from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.model.transformer_layer import TransformerLayer, normed


class ParallelLayer(TransformerLayer):
    """See ``TransformerLayer``, whose parameters it has, but for a norm that may be shared."""

    def forward(self, x_bsh: Tensor, forward_pass: ForwardPass = PLAIN_PASS) -> Tensor:
        """See ``TransformerLayer``."""
        x_bsh, normed_bsh = normed(self.input_layernorm, x_bsh, None)

        def run_both(normed_bsh: Tensor) -> Tensor:
            attended_bsh = self._attention_branch(normed_bsh, forward_pass)
            x_and_attended_bsh = self._stream(x_bsh, normed_bsh) + attended_bsh
            if not self.spec.mlp_norm:
                return x_and_attended_bsh + self._mlp_branch(normed_bsh, forward_pass)
            own_bsh = self.pre_mlp_layernorm(x_bsh)
            mlp_bsh = self._use(
                self.pre_mlp_layernorm,
                x_bsh,
                own_bsh,
                lambda normed_bsh: self._mlp_branch(normed_bsh, forward_pass),
            )
            return x_and_attended_bsh + mlp_bsh

        return self._use(self.input_layernorm, x_bsh, normed_bsh, run_both)
