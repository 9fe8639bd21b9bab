"""A transformer layer that follows its spec: x + attention(norm(x)), then x + mlp(norm(x)).

Shapes: b batch, s sequence, h hidden.
"""

import torch
from torch import Tensor, nn

from megatron.kernels.face import Kernels
from megatron.layers.dropout import DropoutSeeds, dropout
from megatron.layers.rope import RotaryEmbedding
from megatron.model.config import ModelConfig
from megatron.model.layer_spec import layer_spec
from megatron.parallel.tensor import ALONE, TensorParallel


class TransformerLayer(nn.Module):
    """A transformer layer with the parameter names of Megatron's checkpoints.

    Weights are unset until ``megatron.model.init.init_layer`` draws them.

    Args:
        config: the model.
        layer_number: index of the layer in the whole model, from 0.
        device: where the parameters live.
        dtype: type of the parameters and of the activations.
        kernels: of that device and type.
        tensor: the ranks that share the layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_number: int,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
        tensor: TensorParallel = ALONE,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.spec = spec = layer_spec(config, layer_number)
        self._tensor = tensor
        self._hidden_dropout = spec.hidden_dropout

        def norm(is_there: bool = True) -> nn.Module:
            if not is_there:
                return nn.Identity()
            return spec.norm.build(config.hidden_size, device, dtype, kernels)

        self.input_layernorm = norm()
        self.self_attention = spec.attention.build(device, dtype, kernels, tensor)
        self.post_self_attn_layernorm = norm(spec.norm_after_attention)
        self.pre_mlp_layernorm = norm(spec.mlp_norm)
        self.mlp = spec.mlp.build(device, dtype, kernels, tensor)
        self.post_mlp_layernorm = norm(spec.norm_after_mlp)

    def forward(
        self,
        x_bsh: Tensor,
        rope: RotaryEmbedding | None = None,
        seeds: DropoutSeeds | None = None,
    ) -> Tensor:
        """Return the block's output.

        Args:
            x_bsh: residual stream [b, s, h], of the tokens that this rank has.
            rope: rotation of this layer, as its spec says; None without one.
            seeds: of dropout in training; ``None``: nothing is dropped.

        Returns:
            [b, s, h], of the same tokens.
        """
        normed_bsh = self.input_layernorm(x_bsh)
        attended_bsh = self.post_self_attn_layernorm(self.self_attention(normed_bsh, rope, seeds))
        attended_bsh = self._drop(attended_bsh, seeds, "attention output")
        x_bsh = self._stream(x_bsh, normed_bsh) + attended_bsh
        normed_bsh = self.pre_mlp_layernorm(x_bsh)
        mlp_bsh = self.post_mlp_layernorm(self.mlp(normed_bsh))
        mlp_bsh = self._drop(mlp_bsh, seeds, "mlp output")
        return self._stream(x_bsh, normed_bsh) + mlp_bsh

    def _drop(self, branch_bsh: Tensor, seeds: DropoutSeeds | None, use: str) -> Tensor:
        return dropout(branch_bsh, self._hidden_dropout, seeds, use, self._tensor)

    def _stream(self, x_bsh: Tensor, normed_bsh: Tensor) -> Tensor:
        """Return what a branch that reads ``normed_bsh``, the norm of ``x_bsh``, adds to."""
        return normed_bsh if self.spec.adds_to_normed else x_bsh
