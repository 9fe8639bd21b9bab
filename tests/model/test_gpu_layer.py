"""A layer by the kernels of a GPU computes what PyTorch's operations do; Triton interprets it here.

It is what joins the kernels that is tested: which gradient of a bias is formed where, and what the
stream and a norm of it leave each other.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.kernels.cuda.kernels import CudaKernels
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.main_grad import give_main_grad, main_grad_of
from megatron.layers.recompute import Part, Recomputation
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.model.build_layer import build_layer
from megatron.model.parts import rotation_of
from megatron.model.settings import ModelSettings

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPT = ModelSettings.of(
    num_layers=1,
    hidden_size=24,
    ffn_hidden_size=40,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=6,
    seq_length=7,
    max_position_embeddings=7,
    vocab_size=50,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
ROPE: dict[str, Any] = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
KINDS = {
    "gpt": GPT,
    "llama": GPT.replaced(activation="swiglu", add_bias_linear=False, **ROPE),
    "squared relu, half rotation": GPT.replaced(
        activation="squared_relu", rotary_percent=0.7, **ROPE
    ),
    "norms of heads": GPT.replaced(qk_layernorm=True, rotary_interleaved=True, **ROPE),
    "adds to the normed": GPT.replaced(apply_residual_connection_post_layernorm=True),
    "both branches at once": GPT.replaced(parallel_attn=True, parallel_layernorm=True),
}


def results(config: ModelSettings, kernels: Kernels, *, split: bool, again: bool) -> list[Tensor]:
    """Output, gradient of the input, and sums of the parameters' gradients."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    parts: frozenset[Part] = frozenset({"core_attn", "layernorm", "mlp"}) if again else frozenset()
    site = Site(DEVICE, torch.float32, recomputation=Recomputation(parts), given_kernels=kernels)
    layer = build_layer(config, 0, site)
    for parameter in layer.parameters():
        parameter.data.copy_(0.5 * drawn(*parameter.shape))
        give_main_grad(parameter, torch.zeros_like(parameter))
        parameter.grad = main_grad_of(parameter)
    work: list[Any] = []
    defer_weight_gradients(layer, work.append if split else None)
    rotation = rotation_of(config, 0)
    rope = None if rotation is None else rotation.build(site)
    x_bsh = drawn(2, 7, 24).requires_grad_()
    y_bsh = layer(x_bsh, ForwardPass(rope=rope))
    y_bsh.backward(drawn(2, 7, 24))
    with torch.no_grad():
        for each in work:
            each()
    assert x_bsh.grad is not None
    return [y_bsh, x_bsh.grad, *(main_grad_of(each) for each in layer.parameters())]


@pytest.mark.parametrize(
    ("split", "again"), [(False, False), (True, True)], ids=["as it is", "split and computed again"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_that_of_pytorch(kind: str, split: bool, again: bool) -> None:
    config = KINDS[kind]
    own = results(config, CudaKernels(DEVICE, torch.float32), split=split, again=again)
    expected = results(config, ReferenceKernels(), split=split, again=again)
    for got, want in zip(own, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
