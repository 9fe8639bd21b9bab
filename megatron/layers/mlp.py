"""The feed-forward half of a block: h -> ffn -> h.

Shapes: b batch, s sequence, h hidden, f ffn.
"""

import torch
from torch import Tensor, nn

from megatron.kernels.face import Kernels
from megatron.layers.linear import Linear


class MLP(nn.Module):
    """Two linear layers around GELU (tanh approximation) or SwiGLU (arXiv 2002.05202).

    With SwiGLU ``linear_fc1.weight`` is [2f, h], the gate's rows first, as in Megatron's
    checkpoints. Weights are unset until ``megatron.model.init`` draws them.

    Args:
        hidden_size: h.
        ffn_hidden_size: f.
        gated: SwiGLU instead of GELU.
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
        gated: bool,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        inner_rows = 2 * ffn_hidden_size if gated else ffn_hidden_size
        self.linear_fc1 = Linear(
            hidden_size, inner_rows, bias=bias, device=device, dtype=dtype, kernels=kernels
        )
        self.linear_fc2 = Linear(
            ffn_hidden_size, hidden_size, bias=bias, device=device, dtype=dtype, kernels=kernels
        )
        self._activation = kernels.swiglu if gated else kernels.gelu

    def forward(self, x_bsh: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        return self.linear_fc2(self._activation(self.linear_fc1(x_bsh)))
