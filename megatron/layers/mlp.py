"""The feed-forward half of a block: h -> ffn -> h.

Shapes: b batch, s sequence, h hidden, f ffn.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from megatron.kernels.face import Kernels
from megatron.layers.linear import Linear
from megatron.layers.recompute import again
from megatron.parallel.tensor import ALONE, TensorParallel

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
        tensor: the ranks that share the columns f.

    Attributes:
        recompute_mlp: the backward computes again all but the input.
    """

    recompute_mlp = False

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
        tensor: TensorParallel = ALONE,
    ) -> None:
        super().__init__()
        fused = 2 if activation in ("swiglu", "geglu") else 1
        self.linear_fc1 = Linear(
            hidden_size,
            ffn_hidden_size * fused,
            bias=bias,
            device=device,
            dtype=dtype,
            kernels=kernels,
            columns=tensor,
            fused=fused,
        )
        self.linear_fc2 = Linear(
            ffn_hidden_size,
            hidden_size,
            bias=bias,
            device=device,
            dtype=dtype,
            kernels=kernels,
            rows=tensor,
        )
        functions: dict[Activation, Callable[..., Tensor]] = {
            "gelu": kernels.gelu,
            "swiglu": kernels.swiglu,
            "geglu": kernels.geglu,
            "squared_relu": kernels.squared_relu,
        }
        self._activation = functions[activation]
        # without a gate it forms the bias's gradient, beside that of what holds the bias
        self.linear_fc1.leaves_bias_gradient = bias and fused == 1

    @property
    def reader(self) -> Linear | None:
        """What reads the input, if nothing else does: computing again would."""
        return None if self.recompute_mlp else self.linear_fc1

    def forward(self, x_bsh: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h], of the tokens that this rank has."""
        return again(self._run, x_bsh) if self.recompute_mlp else self._run(x_bsh)

    def _run(self, x_bsh: Tensor) -> Tensor:
        inner_bsf = self.linear_fc1(x_bsh)
        if self.linear_fc1.leaves_bias_gradient:
            return self.linear_fc2(self._activation(inner_bsf, self.linear_fc1.bias))
        return self.linear_fc2(self._activation(inner_bsf))
