"""A stage runs forward and backward on the meta device, with the kernels of a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.small_models import GPT, LLAMA, Operators, whole_model
from torch import Tensor

from megatron.kernels.counted import counted_kernels
from megatron.kernels.documents import Documents
from megatron.layers.dropout import DropoutSeeds
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.recompute import NO_RECOMPUTATION, Recomputation
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.model.settings import ModelSettings
from megatron.model.stage import RankModel

META = torch.device("meta")
BATCH = 2

CONFIGS = {
    "dropout": GPT,
    "llama": LLAMA,
    "qk norms": LLAMA.replaced(qk_layernorm=True),
    "GEGLU": GPT.replaced(activation="geglu", add_bias_linear=False),
    "squared relu": GPT.replaced(activation="squared_relu"),
    "ReLU": GPT.replaced(activation="relu"),
    "GELU by the error function": GPT.replaced(activation="exact_gelu"),
    "no norms before": LLAMA.replaced(pre_layernorm=False, post_mlp_layernorm=True),
    "norms without biases": GPT.replaced(add_bias_norm=False),
    "ALiBi": GPT.replaced(position_embedding_type="alibi"),
    "window": GPT.replaced(window_size=8),
    "capped scores": GPT.replaced(attn_logit_softcapping=30.0),
    "narrow heads": GPT.replaced(kv_channels=12),
    "multi-token prediction": LLAMA.replaced(mtp_num_layers=1),
    "wide RMSNorm": replace(LLAMA, hidden_size=16384),
}


def model_of(
    config: ModelSettings,
    recomputation: Recomputation = NO_RECOMPUTATION,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> RankModel:
    """Return the whole model on the meta device."""
    kernels = counted_kernels(dtype)
    site = Site(META, dtype, recomputation=recomputation, given_kernels=kernels, **options)
    model = whole_model(config, site)
    model.begin(training=True)
    return model


def run(model: RankModel, documents: Documents | None = None) -> tuple[list[str], list[Tensor]]:
    """Return the operators of F, split B and W, and the output and the input's gradient."""
    config = model.config
    depths = config.further.mtp_num_layers
    weight = next(model.chunks.parameters())
    shape = BATCH, config.seq_length, config.hidden_size
    x_bsh = torch.empty(shape, dtype=weight.dtype, device=META).requires_grad_()
    ahead_bwh = None
    if depths:
        wide = BATCH, config.seq_length + depths - 1, config.hidden_size
        ahead_bwh = torch.empty(wide, dtype=weight.dtype, device=META)
    work: list[Any] = []
    for chunk in model.chunks:
        defer_weight_gradients(chunk, work.append)
    with Operators() as operators:
        seeds = DropoutSeeds(1, 0, 0)
        y_bsh = model(0, x_bsh, ForwardPass(seeds, documents=documents, ahead_bwh=ahead_bwh))
        torch.autograd.backward((y_bsh,), (torch.empty_like(y_bsh),))
        with torch.no_grad():
            for each in work:
                each()
    assert x_bsh.grad is not None
    return operators.names, [y_bsh, x_bsh.grad]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_without_values_has_shapes(name: str) -> None:
    config = CONFIGS[name]
    names, (y_bsh, grad_bsh) = run(model_of(config))
    copies = 1 + config.further.mtp_num_layers
    assert y_bsh.shape == (copies * BATCH, config.seq_length, config.hidden_size)
    assert grad_bsh.shape == (BATCH, config.seq_length, config.hidden_size)
    assert y_bsh.is_meta
    assert "aten::addmm" in names
    assert "aten::bernoulli_" not in names, "dropout is one kernel on a GPU"


def test_attention_is_the_kernel_of_a_gpu() -> None:
    assert "aten::_scaled_dot_product_flash_attention" in run(model_of(GPT))[0]
    wide = run(model_of(LLAMA, dtype=torch.float32))[0]
    assert "aten::_efficient_attention_forward" in wide, "keys of query groups, repeated"


def test_documents_count_as_whole_samples_where_a_kernel_packs_them() -> None:
    documents, flash = _documents(GPT), "aten::_scaled_dot_product_flash_attention"
    packed = GPT.replaced(attention_dropout=0.0)
    assert flash in run(model_of(packed), documents)[0]
    assert flash not in run(model_of(GPT), documents)[0], "no kernel packs and drops"


def _documents(config: ModelSettings) -> Documents:
    first_bs = torch.zeros(BATCH, config.seq_length, dtype=torch.int64)
    first_bs[:, config.seq_length // 2 :] = config.seq_length // 2
    return Documents.of(first_bs, lambda tensor: tensor.to(META))


def test_a_long_row_of_an_rms_norm_is_one_kernel_of_a_gpu() -> None:
    names, _ = run(model_of(CONFIGS["wide RMSNorm"]))
    assert "megatron_kernels::_fused_rms_norm" in names
    assert "megatron_kernels::_fused_rms_norm_backward" in names


@pytest.mark.parametrize(
    "recomputation",
    [
        Recomputation(group=1),
        Recomputation(group=2, most=1),
        Recomputation(frozenset(("core_attn", "layernorm", "mlp"))),
    ],
    ids=str,
)
@pytest.mark.parametrize("eight_bits", [False, True])
def test_layers_are_computed_again(recomputation: Recomputation, eight_bits: bool) -> None:
    options = EightBitSettings("hybrid") if eight_bits else None
    kept, _ = run(model_of(LLAMA, eight_bits=options))
    again, _ = run(model_of(LLAMA, recomputation, eight_bits=options))
    assert len(again) > len(kept)


def test_a_wide_stream_is_fp32() -> None:
    names, (y_bsh, _) = run(model_of(GPT, wide_stream=True))
    assert y_bsh.dtype == torch.bfloat16, "the last norm narrows it"
    assert "megatron_kernels::norm" in names


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("wide", [False, True])
def test_products_in_8_bits(recipe: Any, wide: bool) -> None:
    model = model_of(
        LLAMA, eight_bits=EightBitSettings("hybrid", recipe, wide_weight_gradients=wide)
    )
    first, _ = run(model)
    products = LLAMA.num_layers * 4 * (2 if wide else 3)
    assert first.count("megatron_kernels::eight_bit_product") == products
    assert model.eight_bits is not None
    model.eight_bits.end(lambda seen: None)
    model.begin(training=True)
    later, _ = run(model)
    knows_scales = recipe == "delayed"
    quantised = [names.count("megatron_kernels::quantise") for names in (first, later)]
    assert (quantised[1] < quantised[0]) == knows_scales
