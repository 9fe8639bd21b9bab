"""The feed-forward half of a block: h -> ffn -> h.

Shapes: b batch, s sequence, h hidden, f ffn.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from megatron.kernels.face import Kernels
from megatron.layers.linear import Linear

Activation = Literal["gelu", "swiglu", "geglu", "squared_relu"]
"""GELU by its tanh approximation, SwiGLU or, with that GELU, GeGLU (arXiv 2002.05202), or relu(x)^2
(arXiv 2109.08668)."""


class MLP(nn.Module):
    """Two linear layers around an activation function.

    With a gate ``linear_fc1.weight`` is [2f, h], the gate's rows first, as in Megatron's
    checkpoints. Weights are unset until ``megatron.model.init`` draws them.

    Args:
        hidden_size: h.
        ffn_hidden_size: f.
        activation: the function between the layers.
        bias: biases in both linear layers.
        device: where the parameters live.
        dtype: type of the parameters.
        kernels: of that device and type.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: Activation,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        inner_rows = ffn_hidden_size * (2 if activation in ("swiglu", "geglu") else 1)
        self.linear_fc1 = Linear(
            hidden_size, inner_rows, bias=bias, device=device, dtype=dtype, kernels=kernels
        )
        self.linear_fc2 = Linear(
            ffn_hidden_size, hidden_size, bias=bias, device=device, dtype=dtype, kernels=kernels
        )
        functions = {
            "gelu": kernels.gelu,
            "swiglu": kernels.swiglu,
            "geglu": kernels.geglu,
            "squared_relu": kernels.squared_relu,
        }
        self._activation = functions[activation]

    def forward(self, x_bsh: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        return self.linear_fc2(self._activation(self.linear_fc1(x_bsh)))
