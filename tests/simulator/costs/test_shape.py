"""Counts of FLOPs, parameters and bytes: the paper's table, and an independent count."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.kernels.choose import kernels_for
from megatron.kernels.eight_bits import E4M3
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.model.build_layer import build_layer
from megatron.model.config import ModelConfig
from megatron.model.eight_bits import EightBitConfig, EightBitLayers, linear_layers
from megatron.model.init import init_layer
from megatron.simulator.costs.activation_bytes import (
    layer_activation_bytes,
    layer_factor_bytes,
    stage_activation_bytes,
    stage_recomputed_bytes,
)
from megatron.simulator.costs.recomputed import Recomputed
from megatron.simulator.costs.shape import Shape, TensorSplit, iteration_flops
from megatron.training.planning.model_shape import shape_of

CPU = torch.device("cpu")
sizes = st.integers(1, 64)


@given(b=sizes, s=sizes, h=sizes, a=sizes, v=sizes)
def test_a_plain_gpt_is_that_of_the_papers_table_4(b: int, s: int, h: int, a: int, v: int) -> None:
    shape = Shape(h, a, s, v, micro_batch_size=b)
    layer = shape.forward_flops + shape.backward_flops + shape.weight_gradient_flops
    assert layer == b * s * h * (72 * h + 12 * s)
    assert 3 * shape.output_product_flops == 6 * b * s * h * v
    assert 2 * shape.layer_parameters == 24 * h**2
    assert 2 * shape.vocabulary_parameters == 2 * h * v
    assert layer_activation_bytes(shape) == 34 * b * s * h


@given(b=sizes, s=sizes, h=sizes, a=sizes)
def test_what_flash_attention_and_recomputation_leave(b: int, s: int, h: int, a: int) -> None:
    stored = Shape(h, a, s, 1, micro_batch_size=b, kept="all")
    again = Shape(h, a, s, 1, micro_batch_size=b, recomputed=Recomputed(group=2))
    flash = Shape(h, a, s, 1, micro_batch_size=b)
    assert layer_activation_bytes(stored) == b * s * (34 * h + 5 * a * s)
    assert stage_activation_bytes(again, 5) == 3 * 2 * b * s * h  # groups of 2, 2 and 1 layers
    assert again.stage_repeated_flops(5) == 5 * flash.forward_flops
    assert stage_activation_bytes(flash, 5) == 5 * layer_activation_bytes(flash)
    assert flash.stage_repeated_flops(5) == 0
    assert iteration_flops(again, 3, 5) == iteration_flops(flash, 3, 5)


@given(b=sizes, s=sizes, h=sizes, t=st.sampled_from([1, 2, 4, 8]))
def test_tensor_ranks_keep_what_equations_2_and_4_say(b: int, s: int, h: int, t: int) -> None:
    """Of arXiv 2205.05198: sbh (10 + 24/t + 5as/(ht)), and all of it by t on split sequences."""
    stored = Shape(8 * h, 8, 8 * s, 1, micro_batch_size=b, kept="all")
    e, scores = stored.elements, 5 * 8 * b * (8 * s) ** 2
    shared, split = (replace(stored, tensor=TensorSplit(t, each)) for each in (False, True))
    assert layer_activation_bytes(shared) == pytest.approx(e * (10 + 24 / t) + scores / t)
    assert layer_activation_bytes(split) == pytest.approx((34 * e + scores) / t)
    for each in (shared, split):
        assert t * each.matrix_parameters == stored.matrix_parameters
        assert t * each.forward_flops == stored.forward_flops
        assert iteration_flops(each, 3, 5) == iteration_flops(stored, 3, 5)


@given(a=st.integers(1, 8), s=sizes, layers=st.integers(0, 6), most=st.integers(1, 8))
def test_the_first_layers_of_a_block_are_computed_again(
    a: int, s: int, layers: int, most: int
) -> None:
    plain = Shape(8 * a, a, s, 1, dropout=False)
    block = replace(plain, recomputed=Recomputed(group=1, most=most))
    again = min(layers, most)
    kept = again * 2 * s * 8 * a + (layers - again) * layer_activation_bytes(plain)
    assert stage_activation_bytes(block, layers) == kept
    whole = layers * layer_activation_bytes(plain)  # R makes a stage as if nothing were left out
    assert kept + stage_recomputed_bytes(block, layers) == whole
    last_product = plain.linear_flops // 3  # of 12 h^2 parameters, the last matrix has 4 h^2
    repeated = again * (plain.forward_flops - last_product)
    assert block.stage_repeated_flops(layers) == repeated


def test_selective_recomputation_drops_the_attention_matrices_of_the_papers() -> None:
    """ArXiv 2205.05198, section 5: 34 bsh are left of bsh (34 + 5as/h)."""
    stored = Shape(64, 4, 16, 1, kept="all", recomputed=Recomputed(core=True))
    assert stage_activation_bytes(stored, 3) == 3 * 34 * 16 * 64
    assert stored.stage_repeated_flops(3) == 3 * stored.attention_flops
    assert layer_factor_bytes(stored) == 32 * 16 * 64


def test_no_dropout_needs_no_masks() -> None:
    assert layer_activation_bytes(Shape(64, 4, 16, 1, dropout=False)) == 32 * 16 * 64
    rotated = Shape(64, 4, 16, 1, dropout=False, own_queries=True)
    assert layer_activation_bytes(rotated) == 36 * 16 * 64  # queries and keys once more


def test_squared_relu_keeps_one_inner_activation_less_than_gelu() -> None:
    shape = Shape(64, 4, 16, 1, dropout=False, output_slope=True)
    assert layer_activation_bytes(shape) == (32 - 2 * 4) * 16 * 64


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False},
        {"normalization": "RMSNorm", "squared_relu": True, "qk_layernorm": True},
        {"add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": True},
        {"add_qkv_bias": True, "swiglu": True},
        {"geglu": True, "post_self_attn_layernorm": True, "post_mlp_layernorm": True},
        {"post_mlp_layernorm": True, "normalization": "RMSNorm", "apply_layernorm_1p": True},
        {"parallel_attn": True},
        {"parallel_attn": True, "parallel_layernorm": True, "post_self_attn_layernorm": True},
    ],
)
def test_parameters_are_those_of_the_layer_that_trains(options: dict[str, Any]) -> None:
    model = ModelConfig(2, 24, 40, 4, 2, 10, 8, 8, 30, **options)
    layer = build_layer(model, 0, CPU, torch.float32, ReferenceKernels())
    shape = shape_of(model, 1)
    assert shape.layer_parameters == sum(p.numel() for p in layer.parameters())
    assert shape.matrix_parameters == sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    assert shape.linear_flops == 2 * shape.tokens * shape.matrix_parameters


def kept_bytes(model: ModelConfig, eight_bits: EightBitConfig | None = None) -> int:
    """Bytes of the activations (not of vectors) that a layer keeps, by PyTorch's own account."""
    kernels = kernels_for(CPU, torch.bfloat16)
    layer = build_layer(model, 0, CPU, torch.bfloat16, kernels)
    if eight_bits is not None:
        EightBitLayers(eight_bits, linear_layers(layer, "0."), kernels, CPU, torch.bfloat16)
    init_layer(layer, 0, model, seed=0)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_activation = tensor.dtype in (torch.bfloat16, E4M3) and tensor.dim() > 1
        if is_activation and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        x = torch.randn(1, 8, 24, dtype=torch.bfloat16, requires_grad=True)
        y = layer(x)
    assert y.isfinite().all()
    return sum(kept.values())


@pytest.mark.parametrize(
    "options",
    [
        {"post_self_attn_layernorm": True},
        {"post_self_attn_layernorm": True, "post_mlp_layernorm": True},
        {"parallel_attn": True},
        {"parallel_attn": True, "parallel_layernorm": True},
        {"parallel_attn": True, "post_mlp_layernorm": True},
        {"apply_layernorm_1p": True},
    ],
    ids=str,
)
def test_norms_and_their_order_change_what_is_kept_as_counted(options: dict[str, Any]) -> None:
    plain = ModelConfig(2, 24, 40, 4, 2, 10, 8, 8, 30, hidden_dropout=0.0)
    other = replace(plain, **options)
    counted = [layer_activation_bytes(shape_of(model, 1)) for model in (plain, other)]
    assert kept_bytes(other) - kept_bytes(plain) == counted[1] - counted[0]


@pytest.mark.parametrize("wide_gradients", [False, True], ids=["8 bits", "wide gradients"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"swiglu": True, "normalization": "RMSNorm"},
        {"squared_relu": True},
        {"parallel_attn": True},
    ],
    ids=str,
)
def test_8_bits_change_what_is_kept_as_counted(
    options: dict[str, Any], wide_gradients: bool
) -> None:
    model = replace(ModelConfig(2, 24, 40, 4, 2, 10, 8, 8, 30, hidden_dropout=0.0), **options)
    config = EightBitConfig(wide_weight_gradients=wide_gradients)
    shape = replace(shape_of(model, 1), narrow=range(1, 2), narrow_factors=not wide_gradients)
    counted = layer_activation_bytes(shape.of_layers(1, 1)) - layer_activation_bytes(shape)
    if wide_gradients:  # in 8 bits only GPUs keep what is counted: see tests/pretended_gpu
        assert kept_bytes(model, config) - kept_bytes(model) == counted == 0
    assert layer_activation_bytes(shape.of_layers(0, 1)) == layer_activation_bytes(shape)
    stage = shape.of_layers(0, 2)
    assert stage_activation_bytes(stage, 2) == 2 * layer_activation_bytes(shape) + counted
    assert 2 * stage.narrow_weight_bytes == 2 * shape.matrix_parameters


@given(
    h=sizes,
    ffn=sizes,
    heads=st.integers(1, 8),
    groups=st.integers(1, 8),
    channels=sizes,
    s=sizes,
    v=sizes,
    gated=st.booleans(),
    layers=st.integers(1, 5),
    m=st.integers(1, 5),
)
def test_any_widths_count_as_those_of_a_model_that_trains(
    h: int,
    ffn: int,
    heads: int,
    groups: int,
    channels: int,
    s: int,
    v: int,
    gated: bool,
    layers: int,
    m: int,
) -> None:
    model = ModelConfig(layers, h, ffn, heads, groups, channels, s, s, v, swiglu=gated)
    shape = Shape(
        h,
        heads,
        s,
        v,
        ffn_hidden_size=ffn,
        query_width=heads * channels,
        key_value_width=2 * groups * channels,
        gated_mlp=gated,
    )
    assert iteration_flops(shape, layers, m) == iteration_flops(shape_of(model, 1), layers, m)
