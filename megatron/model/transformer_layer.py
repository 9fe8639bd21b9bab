"""A transformer layer: x + attention(norm(x)), then x + mlp(norm(x)).

Shapes: b batch, s sequence, h hidden.
"""

from torch import Tensor, nn

from megatron.layers.dropout import dropout
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.norm import NoNorm
from megatron.layers.site import Site
from megatron.model.parts import build_attention, build_mlp
from megatron.model.settings import ModelSettings
from megatron.model.stream import Normed, Stream


class TransformerLayer(nn.Module):
    """A transformer layer with the parameter names of Megatron's checkpoints.

    Weights are unset until ``megatron.model.init.init_layer`` draws them.

    Args:
        config: the model.
        layer_number: index of the layer in the whole model, from 0.
        site: device, dtype, ranks and kernels of the layer.
    """

    def __init__(self, config: ModelSettings, layer_number: int, site: Site) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.block = block = config.block
        self._site = site

        def norm(*, is_there: bool = True, of_stream: bool = False) -> nn.Module:
            if not is_there:
                return nn.Identity()
            if of_stream and not block.pre_layernorm:
                return NoNorm(site.dtype)
            return config.norm.build(config.hidden_size, site, of_stream=of_stream)

        self.input_layernorm = norm(of_stream=True)
        self.self_attention = build_attention(config, layer_number, site)
        self.post_self_attn_layernorm = norm(is_there=block.post_self_attn_layernorm)
        self.pre_mlp_layernorm = norm(is_there=block.mlp_has_norm, of_stream=True)
        self.mlp = build_mlp(config, layer_number, site)
        self.post_mlp_layernorm = norm(is_there=block.post_mlp_layernorm)

    def forward(self, x_bsh: Tensor, forward_pass: ForwardPass = PLAIN_PASS) -> Tensor:
        """Return the layer's output.

        Args:
            x_bsh: residual stream [b, s, h], of the tokens that this rank has, in the dtype of the
                activations or in fp32.
            forward_pass: the data of the pass for this layer, such as positions and seeds.

        Returns:
            [b, s, h], of the same tokens.
        """
        x = self._stream(x_bsh)
        x = x + self._attention(x.normed(self.input_layernorm, self.self_attention), forward_pass)
        y = x + self._mlp(x.normed(self.pre_mlp_layernorm, self.mlp), forward_pass)
        return y.total

    def _stream(self, x_bsh: Tensor) -> Stream:
        """Return ``x_bsh`` as a residual stream, to which branches can be added."""
        return Stream(
            x_bsh,
            adds_to_normed=self.block.apply_residual_connection_post_layernorm,
            norms_again="layernorm" in self._site.recomputation.parts,
        )

    def _attention(self, normed: Normed, forward_pass: ForwardPass) -> Tensor:
        """Return the summand of attention for the stream."""
        with normed.reading():
            attended_bsh = self.self_attention(normed.value, forward_pass)
            if self.block.post_self_attn_layernorm:
                attended_bsh = self.post_self_attn_layernorm(attended_bsh)
            return self._drop(attended_bsh, forward_pass, "attention output")

    def _mlp(self, normed: Normed, forward_pass: ForwardPass) -> Tensor:
        """Return the summand of the MLP for the stream."""
        with normed.reading():
            mlp_bsh = self.mlp(normed.value, forward_pass)
            if self.block.post_mlp_layernorm:
                mlp_bsh = self.post_mlp_layernorm(mlp_bsh)
            return self._drop(mlp_bsh, forward_pass, "mlp output")

    def _drop(self, branch_bsh: Tensor, forward_pass: ForwardPass, use: str) -> Tensor:
        seeds = forward_pass.seeds
        if self.block.residual_multiplier != 1:
            branch_bsh = branch_bsh * self.block.residual_multiplier
        return dropout(branch_bsh, self.block.hidden_dropout, seeds, use, self._site)
