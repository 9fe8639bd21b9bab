"""One pre-norm GPT block: x + attention(norm(x)), then x + mlp(norm(x)).

Shapes: b batch, s sequence, h hidden.
"""

import torch
from torch import Tensor, nn

from megatron.kernels.face import Kernels
from megatron.layers.attention import AttentionShape, SelfAttention
from megatron.layers.dropout import DropoutSeeds, dropout
from megatron.layers.mlp import MLP
from megatron.layers.norm import build_norm
from megatron.layers.rope import RotaryEmbedding
from megatron.model.config import ModelConfig
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
        self._tensor = tensor
        self.hidden_dropout = config.hidden_dropout

        def norm(size: int) -> nn.Module:
            return build_norm(
                config.normalization, size, config.norm_epsilon, dtype, device, kernels
            )

        shape = AttentionShape(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_groups=config.num_query_groups,
            head_size=config.kv_channels,
        )
        self.input_layernorm = norm(config.hidden_size)
        self.self_attention = SelfAttention(
            shape,
            bias=config.add_bias_linear,
            qkv_bias=config.add_qkv_bias,
            dropout=config.attention_dropout,
            qk_norms=(
                (norm(config.kv_channels), norm(config.kv_channels))
                if config.qk_layernorm
                else None
            ),
            device=device,
            dtype=dtype,
            kernels=kernels,
            tensor=tensor,
        )
        self.pre_mlp_layernorm = norm(config.hidden_size)
        self.mlp = MLP(
            config.hidden_size,
            config.ffn_hidden_size,
            activation=config.activation,
            bias=config.add_bias_linear,
            device=device,
            dtype=dtype,
            kernels=kernels,
            tensor=tensor,
        )

    def forward(
        self,
        x_bsh: Tensor,
        rope: RotaryEmbedding | None = None,
        seeds: DropoutSeeds | None = None,
    ) -> Tensor:
        """Return the block's output.

        Args:
            x_bsh: residual stream [b, s, h], of the tokens that this rank has.
            rope: rotation shared by all layers; None with learned positions.
            seeds: of dropout in training; ``None``: nothing is dropped.

        Returns:
            [b, s, h], of the same tokens.
        """

        def dropped(branch_bsh: Tensor, use: str) -> Tensor:
            return dropout(branch_bsh, self.hidden_dropout, seeds, use, self._tensor)

        attended_bsh = self.self_attention(self.input_layernorm(x_bsh), rope, seeds)
        x_bsh = x_bsh + dropped(attended_bsh, "attention output")
        mlp_bsh = self.mlp(self.pre_mlp_layernorm(x_bsh))
        return x_bsh + dropped(mlp_bsh, "mlp output")
