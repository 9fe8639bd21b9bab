"""A transformer layer whose norms Transformer Engine rounds, beside one that rounds them later."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from harness.marks import full
from kernels.engine_stand_in import installed, layernorm_fwd, rmsnorm_fwd
from model.test_transformer_layer import CPU, GPT, LLAMA
from torch import Tensor

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.engine_multiplier import EngineMultiplier
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.main_grad import main_grad_of
from megatron.layers.recompute import NO_RECOMPUTATION, Recomputation
from megatron.layers.rope import RotaryEmbedding
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.model.build_layer import build_layer
from megatron.model.eight_bits import EightBitLayers, linear_layers
from megatron.model.init import init_layer
from megatron.model.ownership import owned_by
from megatron.model.settings import ModelSettings
from megatron.model.transformer_layer import TransformerLayer
from megatron.optimizer.bucket import Bucket
from megatron.parallel.tensor import ALONE

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "kv_channels": 16,
    "seq_length": 32,
    "init_method_std": 0.1,
}
SMALL, GATED = GPT.replaced(**SIZES), LLAMA.replaced(**SIZES)
ITERATIONS, MICROBATCHES = 2, 2


class Calls:
    """Transformer Engine with norms that are counted."""

    def __init__(self) -> None:
        self.count = 0

    def counted(self, function: Any) -> Any:
        """The same function."""

        @wraps(function)
        def call(**given: Any) -> Any:
            self.count += 1
            return function(**given)

        return call


def train(
    config: ModelSettings,
    dtype: torch.dtype,
    recomputation: Recomputation = NO_RECOMPUTATION,
    *,
    split: bool = False,
    is_narrow: bool = True,
) -> dict[str, Tensor]:
    """All outputs and gradients of a layer, by name; the second iteration has delayed scales."""
    site = Site(CPU, dtype, recomputation=recomputation)
    layer = build_layer(config, 0, site)
    init_layer(layer, 0, config, seed=1)
    owned = list(owned_by(layer, "", ALONE))
    Bucket(owned, site.kernels)
    narrow = EightBitLayers(
        EightBitSettings("hybrid", transformer_engine=True),
        linear_layers(layer, "") if is_narrow else (),
        site,
    )
    later: list[Callable[[], None]] = []
    defer_weight_gradients(layer, later.append if split else None)
    rope = (
        RotaryEmbedding(16, 32, 1.0, 10000, CPU) if config.block.add_bias_linear is False else None
    )
    found: dict[str, Tensor] = {}
    for iteration in range(ITERATIONS):
        narrow.begin(training=True)
        for microbatch in range(MICROBATCHES):
            found |= one(layer, dtype, recomputation, rope, 2 * iteration + microbatch)
        while later:
            later.pop(0)()
        narrow.end(lambda largest: None)
    return found | {own.name: main_grad_of(own.parameter) for own in owned}


def one(
    layer: TransformerLayer,
    dtype: torch.dtype,
    recomputation: Recomputation,
    rope: RotaryEmbedding | None,
    number: int,
) -> dict[str, Tensor]:
    """Forward and backward of a microbatch."""
    generator = torch.Generator().manual_seed(number)
    x, grad = (torch.randn(2, 32, 64, generator=generator).to(dtype) for _ in range(2))
    x.requires_grad_()
    y = recomputation.run([layer], lambda own, x: own(x, ForwardPass(rope=rope)), x)
    y.backward(grad * 1e-3)
    assert x.grad is not None
    return {f"output {number}": y.detach(), f"input's gradient {number}": x.grad}


@pytest.mark.parametrize(
    ("config", "recomputation", "norms"),
    [
        (SMALL, NO_RECOMPUTATION, 2),
        (GATED.replaced(apply_layernorm_1p=True), NO_RECOMPUTATION, 2),
        full(GATED, Recomputation(group=1), 4),
        full(SMALL, Recomputation(parts=frozenset({"mlp", "core_attn"})), 1),
        full(SMALL, Recomputation(parts=frozenset({"layernorm"})), 0),
        full(SMALL.replaced(apply_residual_connection_post_layernorm=True), NO_RECOMPUTATION, 0),
        full(SMALL.replaced(parallel_attn=True), NO_RECOMPUTATION, 0),
    ],
    ids=["GPT", "Llama", "all again", "MLP again", "norms again", "adds to normed", "parallel"],
)
@pytest.mark.parametrize("split", [False, True], ids=["B", "B and W"])
def test_a_layer_is_the_same(
    config: ModelSettings,
    recomputation: Recomputation,
    norms: int,
    split: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In fp32, that is: but for a few numbers that are rounded to the other side."""
    calls = Calls()
    norms_of = {form.__name__: calls.counted(form) for form in (layernorm_fwd, rmsnorm_fwd)}
    with installed(**norms_of):
        fused = train(config, torch.float32, recomputation, split=split)
        assert calls.count == norms * MICROBATCHES, "in the first iteration scales are not known"
        monkeypatch.setattr(EngineMultiplier, "norm", lambda *_: None)
        usual = train(config, torch.float32, recomputation, split=split)
        assert calls.count == norms * MICROBATCHES
    assert fused.keys() == usual.keys()
    for name, value in usual.items():
        assert off(fused[name], value) < (1e-3 if norms else 1e-9), name


@pytest.mark.parametrize("config", [SMALL, full(GATED)], ids=["GPT", "Llama"])
def test_in_16_bits_it_is_no_less_exact(
    config: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rounding is left out. What that changes is less than what 8 bits cost."""
    with installed():
        exact = train(config, torch.float32, is_narrow=False)
        fused = train(config, torch.bfloat16)
        monkeypatch.setattr(EngineMultiplier, "norm", lambda *_: None)
        usual = train(config, torch.bfloat16)
    assert fused.keys() == usual.keys() == exact.keys()
    for name, value in exact.items():
        assert off(fused[name], value) < 1.25 * off(usual[name], value), name  # 64 are few numbers
        assert off(fused[name], usual[name]) < 0.8 * off(usual[name], value), name
    assert not torch.equal(fused["output 2"], usual["output 2"])


def off(found: Tensor, expected: Tensor) -> float:
    """The error, relative to what is expected."""
    return float((found.double() - expected).norm() / expected.double().norm())
