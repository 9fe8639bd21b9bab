"""A transformer layer that follows its spec: x + attention(norm(x)), then x + mlp(norm(x)).

Shapes: b batch, s sequence, h hidden.
"""

from collections.abc import Callable

from torch import Tensor, nn

from megatron.layers.dropout import dropout
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.linear import Linear
from megatron.layers.norm import LayerNorm, RMSNorm
from megatron.layers.normed_input import read_norm
from megatron.layers.recompute import forgetting
from megatron.layers.site import Site
from megatron.model.config import ModelConfig
from megatron.model.layer_spec import layer_spec


class TransformerLayer(nn.Module):
    """A transformer layer with the parameter names of Megatron's checkpoints.

    Weights are unset until ``megatron.model.init.init_layer`` draws them.

    Args:
        config: the model.
        layer_number: index of the layer in the whole model, from 0.
        site: what the layer is built in.
    """

    def __init__(self, config: ModelConfig, layer_number: int, site: Site) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.spec = spec = layer_spec(config, layer_number)
        self._site = site

        def norm(*, is_there: bool = True, of_stream: bool = False) -> nn.Module:
            if not is_there:
                return nn.Identity()
            return spec.norm.build(config.hidden_size, site, of_stream=of_stream)

        self.input_layernorm = norm(of_stream=True)
        self.self_attention = spec.attention.build(site)
        self.post_self_attn_layernorm = norm(is_there=spec.norm_after_attention)
        self.pre_mlp_layernorm = norm(is_there=spec.mlp_norm, of_stream=True)
        self.mlp = spec.mlp.build(site)
        self.post_mlp_layernorm = norm(is_there=spec.norm_after_mlp)

    def forward(self, x_bsh: Tensor, forward_pass: ForwardPass = PLAIN_PASS) -> Tensor:
        """Return the block's output.

        Args:
            x_bsh: residual stream [b, s, h], of the tokens that this rank has, in the type of the
                activations or in fp32.
            forward_pass: what the pass brings to the layer.

        Returns:
            [b, s, h], of the same tokens.
        """
        stream_bsh, attended_bsh = self._attend(x_bsh, forward_pass)
        stream_bsh, normed_bsh = normed(
            self.pre_mlp_layernorm, stream_bsh, attended_bsh, self._reader(self.mlp)
        )
        mlp_bsh = self._use(
            self.pre_mlp_layernorm,
            stream_bsh,
            normed_bsh,
            lambda normed_bsh: self._mlp_branch(normed_bsh, forward_pass),
        )
        return self._stream(stream_bsh, normed_bsh) + mlp_bsh

    def _attend(self, x_bsh: Tensor, forward_pass: ForwardPass) -> tuple[Tensor, Tensor]:
        """Return the stream and what attention adds to it."""
        x_bsh, normed_bsh = normed(
            self.input_layernorm, x_bsh, None, self._reader(self.self_attention)
        )
        attended_bsh = self._use(
            self.input_layernorm,
            x_bsh,
            normed_bsh,
            lambda normed_bsh: self._attention_branch(normed_bsh, forward_pass),
        )
        return self._stream(x_bsh, normed_bsh), attended_bsh

    def _reader(self, branch: nn.Module) -> Linear | None:
        """Return the one that reads the norm before a branch, if nothing else does."""
        reader = None if self.spec.adds_to_normed else getattr(branch, "reader", None)
        assert reader is None or isinstance(reader, Linear)
        return reader

    def _use(
        self,
        norm: nn.Module,
        x_bsh: Tensor,
        normed_bsh: Tensor,
        use: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return what ``use`` makes of the norm of ``x_bsh``."""
        if "layernorm" in self._site.recomputation.parts:
            return forgetting(norm, x_bsh, normed_bsh, use)
        return use(normed_bsh)

    def _attention_branch(self, normed_bsh: Tensor, forward_pass: ForwardPass) -> Tensor:
        """Return what attention adds to the stream."""
        attended_bsh = self.self_attention(normed_bsh, forward_pass)
        attended_bsh = self.post_self_attn_layernorm(attended_bsh)
        return self._drop(attended_bsh, forward_pass, "attention output")

    def _mlp_branch(self, normed_bsh: Tensor, forward_pass: ForwardPass) -> Tensor:
        """Return what the MLP adds to the stream."""
        mlp_bsh = self.post_mlp_layernorm(self.mlp(normed_bsh, forward_pass))
        return self._drop(mlp_bsh, forward_pass, "mlp output")

    def _drop(self, branch_bsh: Tensor, forward_pass: ForwardPass, use: str) -> Tensor:
        seeds = forward_pass.seeds
        return dropout(branch_bsh, self.spec.hidden_dropout, seeds, use, self._site)

    def _stream(self, x_bsh: Tensor, normed_bsh: Tensor) -> Tensor:
        """Return what a branch that reads ``normed_bsh``, the norm of ``x_bsh``, adds to."""
        return normed_bsh.to(x_bsh.dtype) if self.spec.adds_to_normed else x_bsh


def normed(
    norm: nn.Module, x_bsh: Tensor, part_bsh: Tensor | None, reader: Linear | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``x + part``, or without a part ``x``, and its norm.

    Args:
        norm: of the stream.
        x_bsh: the stream.
        part_bsh: what a branch adds.
        reader: the linear layer that reads the norm; ``None``: others may, too.
    """
    assert isinstance(norm, LayerNorm | RMSNorm)
    if reader is not None:
        return read_norm(reader, norm, x_bsh, part_bsh)
    return norm.add(x_bsh, part_bsh)
