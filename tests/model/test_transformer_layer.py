"""The block: its formula, its parameter names, its dropout."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.layers.dropout import DropoutSeeds
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.rope import RotaryEmbedding
from megatron.layers.site import Site
from megatron.model.init import init_layer
from megatron.model.settings import ModelSettings
from megatron.model.transformer_layer import TransformerLayer

CPU = torch.device("cpu")
GPT = ModelSettings.of(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=40,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=4,
    seq_length=8,
    max_position_embeddings=8,
    vocab_size=100,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.5,
)
LLAMA = GPT.replaced(
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    qk_layernorm=True,
    add_bias_linear=False,
)
QWEN = LLAMA.replaced(activation="squared_relu", add_qkv_bias=True, rotary_interleaved=True)


def make_layer(config: ModelSettings, dtype: torch.dtype = torch.float64) -> TransformerLayer:
    layer = TransformerLayer(config, 0, Site(CPU, dtype))
    init_layer(layer, 0, config, seed=1)
    return layer


@pytest.mark.parametrize("config", [GPT, LLAMA, QWEN], ids=["gpt", "llama", "qwen"])
def test_both_branches_read_normed_and_add_to_the_stream(config: ModelSettings) -> None:
    layer = make_layer(config)
    for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
        assert isinstance(norm.weight, torch.Tensor)
        torch.nn.init.normal_(norm.weight)  # or the one would pass for the other
    rope = RotaryEmbedding(4, 8, 1.0, 10000, CPU) if config is not GPT else None
    turning, x = ForwardPass(rope=rope), torch.randn(2, 8, 16, dtype=torch.float64)
    middle = x + layer.self_attention(layer.input_layernorm(x), turning)
    expected = middle + layer.mlp(layer.pre_mlp_layernorm(middle))
    torch.testing.assert_close(layer(x, turning), expected)


def test_gradients_of_the_whole_block() -> None:
    layer = make_layer(GPT.replaced(qk_layernorm=True, num_query_groups=2))
    x = torch.randn(1, 3, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))


def test_parameters_have_megatrons_names_and_shapes() -> None:
    shapes = {name: tuple(p.shape) for name, p in make_layer(LLAMA).named_parameters()}
    assert shapes == {
        "input_layernorm.weight": (16,),
        "self_attention.linear_qkv.weight": (2 * (2 + 2) * 4, 16),
        "self_attention.linear_proj.weight": (16, 16),
        "self_attention.q_layernorm.weight": (4,),
        "self_attention.k_layernorm.weight": (4,),
        "pre_mlp_layernorm.weight": (16,),
        "mlp.linear_fc1.weight": (80, 16),
        "mlp.linear_fc2.weight": (16, 40),
    }
    names = {name for name, _ in make_layer(GPT).named_parameters()}
    assert {n for n in names if n.endswith("bias")} == {
        "input_layernorm.bias",
        "self_attention.linear_qkv.bias",
        "self_attention.linear_proj.bias",
        "pre_mlp_layernorm.bias",
        "mlp.linear_fc1.bias",
        "mlp.linear_fc2.bias",
    }
    shapes = {name: tuple(p.shape) for name, p in make_layer(QWEN).named_parameters()}
    biases = {name: shape for name, shape in shapes.items() if name.endswith("bias")}
    assert biases == {"self_attention.linear_qkv.bias": (2 * (2 + 2) * 4,)}
    assert shapes["mlp.linear_fc1.weight"] == (40, 16)


@pytest.mark.parametrize("which", ["hidden_dropout", "attention_dropout"])
def test_dropout_follows_its_seed_and_stops_in_evaluation(which: str) -> None:
    changes: dict[str, Any] = {which: 0.5}
    layer = make_layer(GPT.replaced(**changes))
    x = torch.randn(2, 8, 16, dtype=torch.float64)

    def run(microbatch: int) -> torch.Tensor:
        y: torch.Tensor = layer(x, ForwardPass(DropoutSeeds(1, 0, microbatch, 0)))
        return y

    first = run(0)
    assert torch.equal(first, run(0))
    assert not torch.equal(first, run(1))
    torch.testing.assert_close(layer(x), make_layer(GPT)(x))


@pytest.mark.parametrize("config", [GPT, LLAMA, QWEN], ids=["gpt", "llama", "qwen"])
def test_bf16_stays_close_to_float64(config: ModelSettings) -> None:
    config = replace(config, init_method_std=0.1)
    rope = RotaryEmbedding(4, 8, 1.0, 10000, CPU, interleaved=config.positions.rotary_interleaved)
    turning = ForwardPass(rope=rope)
    x = torch.randn(2, 8, 16).bfloat16()
    narrow_layer, wide_layer = (make_layer(config, t) for t in (torch.bfloat16, torch.float64))
    wide_layer.load_state_dict(narrow_layer.state_dict())
    narrow, wide = narrow_layer(x, turning), wide_layer(x.double(), turning)
    assert narrow.dtype == torch.bfloat16
    assert ((narrow.double() - wide).norm() / wide.norm()).item() < 1e-2
