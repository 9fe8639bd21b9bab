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


class TransformerLayer(nn.Module):
    """A transformer layer with the parameter names of Megatron's checkpoints.

    Weights are unset until ``megatron.model.init.init_layer`` draws them.

    Args:
        config: the model.
        layer_number: index of the layer in the whole model, from 0.
        device: where the parameters live.
        dtype: type of the parameters and of the activations.
        kernels: of that device and type.
        stream_kernels: for the norms of the residual stream; ``None``: the same.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_number: int,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
        stream_kernels: Kernels | None = None,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout

        def norm(size: int, kernels: Kernels = kernels) -> nn.Module:
            return build_norm(
                config.normalization, size, config.norm_epsilon, dtype, device, kernels
            )

        shape = AttentionShape(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_groups=config.num_query_groups,
            head_size=config.kv_channels,
        )
        stream_kernels = stream_kernels or kernels
        self.input_layernorm = norm(config.hidden_size, stream_kernels)
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
        )
        self.pre_mlp_layernorm = norm(config.hidden_size, stream_kernels)
        self.mlp = MLP(
            config.hidden_size,
            config.ffn_hidden_size,
            activation=config.activation,
            bias=config.add_bias_linear,
            device=device,
            dtype=dtype,
            kernels=kernels,
        )

    def forward(
        self,
        x_bsh: Tensor,
        rope: RotaryEmbedding | None = None,
        seeds: DropoutSeeds | None = None,
    ) -> Tensor:
        """Return the block's output.

        Args:
            x_bsh: residual stream [b, s, h], in the type of the activations or in fp32.
            rope: rotation shared by all layers; None with learned positions.
            seeds: of dropout in training; ``None``: nothing is dropped.

        Returns:
            [b, s, h].
        """
        attended_bsh = self.self_attention(self.input_layernorm(x_bsh), rope, seeds)
        x_bsh = x_bsh + dropout(attended_bsh, self.hidden_dropout, seeds, "attention output")
        mlp_bsh = self.mlp(self.pre_mlp_layernorm(x_bsh))
        return x_bsh + dropout(mlp_bsh, self.hidden_dropout, seeds, "mlp output")
