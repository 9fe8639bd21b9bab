"""The split backward equals the fused one to the bit, and W does nothing before it is run."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from optimizer.entries import entries
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.kernels.autograd import apply
from megatron.kernels.choose import kernels_for
from megatron.layers.dropout import DropoutSeeds
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.linear import Linear
from megatron.layers.main_grad import main_grad_of
from megatron.layers.rope import RotaryEmbedding
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.model.init import init_layer
from megatron.model.settings import ModelSettings
from megatron.model.transformer_layer import TransformerLayer
from megatron.optimizer.bucket import Bucket

CPU = torch.device("cpu")
GPT = ModelSettings.of(
    num_layers=1,
    hidden_size=32,
    ffn_hidden_size=80,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    seq_length=16,
    max_position_embeddings=16,
    vocab_size=100,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.3,
)
LLAMA = GPT.replaced(
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    qk_layernorm=True,
    add_bias_linear=False,
)
DROPOUT = GPT.replaced(attention_dropout=0.2, hidden_dropout=0.2)
MODELS = {"gpt": GPT, "llama": LLAMA, "dropout": DROPOUT}

Work = Callable[[], None]


def make_layer(config: ModelSettings, dtype: torch.dtype) -> tuple[TransformerLayer, Bucket]:
    layer = TransformerLayer(config, 0, Site(CPU, dtype))
    init_layer(layer, 0, config, seed=1)
    return layer, Bucket(entries(layer.named_parameters()), kernels_for(CPU, dtype))


def draw_batch(config: ModelSettings, dtype: torch.dtype, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (batch, config.seq_length, config.hidden_size)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


def backwards(layer: TransformerLayer, config: ModelSettings, batch: list[Tensor]) -> list[Tensor]:
    """Run F and B of every microbatch; return the gradients of the inputs."""
    rope = RotaryEmbedding(8, 16, 1.0, 10000, CPU) if config is LLAMA else None
    gradients = []
    for microbatch, x_bsh in enumerate(batch):
        x_bsh = x_bsh.clone().requires_grad_()
        y_bsh = layer(x_bsh, ForwardPass(DropoutSeeds(1, 0, microbatch, 0), rope))
        y_bsh.backward(torch.sin(y_bsh.detach() * 7))
        assert x_bsh.grad is not None
        gradients.append(x_bsh.grad)
    return gradients


def main_grads(layer: nn.Module) -> dict[str, Tensor]:
    return {name: main_grad_of(parameter) for name, parameter in layer.named_parameters()}


def matrices(layer: nn.Module) -> set[str]:
    """Parameters whose gradient is W's."""
    return {name for name, parameter in layer.named_parameters() if parameter.dim() == 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_split_and_fused_are_equal_to_the_bit(model: str, dtype: torch.dtype) -> None:
    """Several microbatches are through their B before the first has its W."""
    config = MODELS[model]
    batch = draw_batch(config, dtype)
    fused, _ = make_layer(config, dtype)
    split, _ = make_layer(config, dtype)
    deferred: list[Work] = []
    defer_weight_gradients(split, deferred.append)
    expected = backwards(fused, config, batch)
    for own, other in zip(backwards(split, config, batch), expected, strict=True):
        assert torch.equal(own, other)
    assert len(deferred) == len(batch) * len(matrices(split))
    for name, gradient in main_grads(split).items():
        assert bool(gradient.any()) == (name not in matrices(split)), f"{name} after B, before W"
    for work in deferred:
        work()
    assert any(gradient.any() for gradient in main_grads(split).values())
    for name, gradient in main_grads(fused).items():
        assert torch.equal(main_grads(split)[name], gradient), name


def test_what_is_not_run_is_not_added() -> None:
    """The products of one microbatch of three are left out: exactly its part is missing."""
    batch = draw_batch(GPT, torch.float64)
    split, _ = make_layer(GPT, torch.float64)
    deferred: list[Work] = []
    defer_weight_gradients(split, deferred.append)
    backwards(split, GPT, batch)
    per_microbatch = len(matrices(split))
    for work in deferred[:per_microbatch] + deferred[2 * per_microbatch :]:
        work()
    fused, _ = make_layer(GPT, torch.float64)
    backwards(fused, GPT, [batch[0], batch[2]])
    for name in matrices(split):
        torch.testing.assert_close(main_grads(split)[name], main_grads(fused)[name])


def test_none_joins_the_backward_again() -> None:
    batch = draw_batch(GPT, torch.bfloat16)
    fused, _ = make_layer(GPT, torch.bfloat16)
    joined, _ = make_layer(GPT, torch.bfloat16)
    defer_weight_gradients(joined, lambda work: pytest.fail("deferred after all"))
    defer_weight_gradients(joined, None)
    backwards(fused, GPT, batch)
    backwards(joined, GPT, batch)
    for name, gradient in main_grads(fused).items():
        assert torch.equal(main_grads(joined)[name], gradient), name


def make_linear(defer: Callable[[Work], None] | None, bias: bool = True) -> Linear:
    """A linear layer [3 -> 5] in float64, with its main gradients."""
    site = Site(CPU, torch.float64)
    linear = Linear(3, 5, site, bias=bias)
    generator = torch.Generator().manual_seed(5)
    for parameter in linear.parameters():
        parameter.data.normal_(generator=generator)
    Bucket(entries(linear.named_parameters()), site.kernels)
    linear.defer = defer
    return linear


INPUTS = {
    "one token": torch.randn(3, dtype=torch.float64),
    "rows": torch.randn(4, 3, dtype=torch.float64),
    "columns": torch.randn(3, 4, dtype=torch.float64).t(),
    "swapped": torch.randn(4, 2, 3, dtype=torch.float64).transpose(0, 1),
    "four dimensions": torch.randn(2, 2, 2, 3, dtype=torch.float64),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("expanded", [True, False], ids=["expanded", "own values"])
@pytest.mark.parametrize("name", INPUTS)
def test_any_layout_of_input_and_gradient(name: str, expanded: bool, bias: bool) -> None:
    deferred: list[Work] = []
    split, fused = make_linear(deferred.append, bias), make_linear(None, bias)
    gradients = []
    for linear in (split, fused):
        x = INPUTS[name].detach().requires_grad_()
        y = linear(x)
        gradient = torch.arange(y.numel(), dtype=y.dtype).view(y.shape[::-1])
        gradient = gradient.permute(*range(y.dim())[::-1])  # its strides are reversed
        y.backward(torch.ones(()).to(y).expand_as(y) if expanded else gradient)
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    assert len(deferred) == 1
    assert not main_grad_of(split.weight).any()
    deferred[0]()
    for own, other in zip(split.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(main_grad_of(own), main_grad_of(other))


def test_an_input_without_gradient_still_has_its_weight_gradient() -> None:
    deferred: list[Work] = []
    split, fused = make_linear(deferred.append), make_linear(None)
    for linear in (split, fused):
        linear(INPUTS["rows"]).square().sum().backward()
    deferred[0]()
    torch.testing.assert_close(main_grad_of(split.weight), main_grad_of(fused.weight))
    torch.testing.assert_close(main_grad_of(split.bias), main_grad_of(fused.bias))


def test_a_frozen_weight_leaves_nothing_to_w() -> None:
    split = make_linear(lambda work: pytest.fail("there is no weight gradient"))
    split.weight.requires_grad_(False)
    x = INPUTS["rows"].detach().requires_grad_()
    split(x).sum().backward()
    torch.testing.assert_close(x.grad, split.weight.sum(0).expand(4, 3))
    assert not main_grad_of(split.weight).any()
    assert torch.equal(main_grad_of(split.bias), torch.full((5,), 4.0, dtype=torch.float64))


def test_an_input_changed_in_place_is_caught_in_b() -> None:
    split = make_linear(lambda work: None)
    x = INPUTS["rows"].clone()
    y = split(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("which", ["input", "gradient"])
def test_a_factor_changed_in_place_is_caught_in_w(which: str) -> None:
    """As a receive buffer used again would be."""
    deferred: list[Work] = []
    split = make_linear(deferred.append)
    x = INPUTS["rows"].clone()
    y = split(x)
    gradient = torch.ones_like(y)
    y.backward(gradient)
    (x if which == "input" else gradient).add_(1)
    with pytest.raises(AssertionError, match="between B and W"):
        deferred[0]()


class Tap(torch.autograd.Function):
    """A copy; its context stands for the graph before a layer."""

    contexts: ClassVar[list[weakref.ref[Any]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Tap.contexts.append(weakref.ref(ctx))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


def test_b_leaves_no_graph_and_w_no_memory() -> None:
    deferred: list[Work] = []
    split = make_linear(deferred.append)
    x = apply(Tap, INPUTS["rows"].clone().requires_grad_())
    y = split(x)
    gradient = torch.ones_like(y)
    y.backward(gradient)
    factors = [StorageWeakRef(tensor.untyped_storage()) for tensor in (x, gradient)]
    output = StorageWeakRef(y.untyped_storage())
    del x, y, gradient
    gc.collect()
    assert Tap.contexts[-1]() is None
    assert output.expired()
    assert not any(factor.expired() for factor in factors), "W needs them"
    deferred.pop()()
    gc.collect()
    assert all(factor.expired() for factor in factors)
