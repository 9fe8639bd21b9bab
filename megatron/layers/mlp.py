"""The feed-forward half of a block: h -> ffn -> h.

Shapes: b batch, s sequence, h hidden, f ffn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from torch import Tensor, nn

from megatron.kernels.face import Kernels
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.linear import Linear, LinearInput
from megatron.layers.recompute import Recomputation, again, forgotten
from megatron.layers.site import Site


@dataclass(frozen=True)
class QuickGeGLU:
    """GeGLU with a sigmoid in place of GELU; with both fields it is GPT-OSS's clamped SwiGLU.

    Attributes:
        limit: the gate is at most ``limit``, and up is from ``-limit`` to ``limit``; ``None``: no
            limit.
        offset: added to up.
    """

    limit: float | None = None
    offset: float = 0.0


Activation: TypeAlias = str | QuickGeGLU
"""An operation of ``Kernels`` by its name, as in ``MLPSettings.activation``, or ``QuickGeGLU``."""

_GATED: Final = ("swiglu", "geglu")
"""The operations that take two halves, gate and up (arXiv 2002.05202)."""


def is_gated(activation: Activation) -> bool:
    """Return whether the function takes two halves, gate and up."""
    return activation in _GATED or isinstance(activation, QuickGeGLU)


def function_of(activation: Activation, kernels: Kernels) -> Callable[..., Tensor]:
    """Return the function of a device."""
    if isinstance(activation, QuickGeGLU):
        return partial(kernels.quick_geglu, limit=activation.limit, offset=activation.offset)
    function: Callable[..., Tensor] = getattr(kernels, activation)
    return function


def forgets_active(recomputation: Recomputation, activation: Activation) -> bool:
    """Return whether an MLP computes its activation function again instead of keeping the result.

    Squared ReLU keeps nothing but its result for its own backward, so nothing could be dropped.
    """
    parts = recomputation.parts
    return "mlp_act" in parts and "mlp" not in parts and activation != "squared_relu"


class MLP(nn.Module):
    """Two linear layers around an activation function.

    With a gated function ``linear_fc1.weight`` is [2f, h], the gate's rows first, as in Megatron's
    checkpoints. Weights are unset until ``megatron.model.init`` draws them.

    Args:
        hidden_size: h.
        ffn_hidden_size: f.
        site: device, dtype, ranks and kernels of the layer.
        activation: the function between the layers.
        bias: biases in both linear layers.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        site: Site,
        *,
        activation: Activation,
        bias: bool,
    ) -> None:
        super().__init__()
        fused = 2 if is_gated(activation) else 1
        self.linear_fc1 = Linear(
            hidden_size,
            ffn_hidden_size * fused,
            site,
            bias=bias,
            parallel="columns",
            fused=fused,
        )
        self.linear_fc2 = Linear(ffn_hidden_size, hidden_size, site, bias=bias, parallel="rows")
        self._activation = function_of(activation, site.kernels)
        self._is_computed_again = "mlp" in site.recomputation.parts
        self._forgets_active = forgets_active(site.recomputation, activation)
        quick = site.kernels.activations_form_bias_gradients
        forms = quick and activation in ("gelu", "squared_relu")
        self._activation_forms_bias_gradient = bias and forms

    @property
    def reader(self) -> Linear | None:
        """The linear layer that reads the input; ``None``: recomputation reads it too."""
        return None if self._is_computed_again else self.linear_fc1

    def forward(self, x_bsh: LinearInput, forward_pass: ForwardPass = PLAIN_PASS) -> Tensor:
        """[b, s, h] -> [b, s, h], for the tokens that this rank has."""
        return again(self._run, x_bsh) if self._is_computed_again else self._run(x_bsh)

    def _run(self, x_bsh: LinearInput) -> Tensor:
        adds_bias = self._activation_forms_bias_gradient
        inner_bsf = self.linear_fc1(x_bsh, forms_bias_gradient=not adds_bias)
        added = (self.linear_fc1.bias,) if adds_bias else ()
        active_bsf = self._activation(inner_bsf, *added)
        if not self._forgets_active:
            return self.linear_fc2(active_bsf)
        with forgotten(self._activation, inner_bsf, active_bsf):  # a value needs no added bias
            return self.linear_fc2(active_bsf)
