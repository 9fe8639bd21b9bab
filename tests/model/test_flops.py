"""FLOPs against the paper's closed form and against PyTorch's own count of a plain model."""

from typing import Any

import pytest
import torch
from reference import plain_latent
from reference.plain_gpt import GPTOptions
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.layers.patterns import LayerPattern
from megatron.model.flops import iteration_flops
from megatron.model.settings import ModelSettings

GPT: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 64,
    "ffn_hidden_size": 192,
    "num_attention_heads": 8,
    "num_query_groups": 8,
    "kv_channels": 8,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "vocab_size": 1000,
}


@pytest.mark.parametrize("batch", [1, 6])
def test_plain_gpt_is_the_papers_formula(batch: int) -> None:
    h, s, ffn, layers, vocabulary = 64, 32, 192, 3, 1000
    layer = 8 * batch * s * h**2 + 4 * batch * s**2 * h + 4 * batch * s * h * ffn
    expected = 3 * (2 * batch * s * h * vocabulary + layers * layer)
    assert iteration_flops(ModelSettings.of(**GPT), batch) == expected


def counted_by_pytorch(config: ModelSettings, batch: int) -> int:
    """Forward operations of the same matrix products, as PyTorch counts them."""
    queries = config.attention.num_attention_heads * config.attention.kv_channels
    keys = config.attention.num_query_groups * config.attention.kv_channels
    h, ffn, s = config.hidden_size, config.mlp.ffn_hidden_size, config.seq_length
    x_bsh = torch.randn(batch, s, h)
    probabilities_bnss = torch.randn(batch * config.attention.num_attention_heads, s, s)
    heads_bnsk = torch.randn(
        batch * config.attention.num_attention_heads, s, config.attention.kv_channels
    )
    shapes = [(h, queries), (h, keys), (h, keys), (queries, h), (h, ffn), (ffn, h)]
    if config.mlp.is_gated:
        shapes.append((h, ffn))
    with FlopCounterMode(display=False) as counter:
        for _ in range(config.further.mtp_num_layers):
            nn.Linear(2 * h, h, bias=False)(torch.randn(batch, s, 2 * h))
            nn.Linear(h, config.vocab_size, bias=False)(x_bsh)
        for _ in range(config.num_layers + config.further.mtp_num_layers):
            for width_in, width_out in shapes:
                nn.Linear(width_in, width_out, bias=False)(torch.randn(batch, s, width_in))
            torch.bmm(heads_bnsk, heads_bnsk.transpose(1, 2))
            torch.bmm(probabilities_bnss, heads_bnsk)
        nn.Linear(h, config.vocab_size, bias=False)(x_bsh)
    flops: int = counter.get_total_flops()
    return flops


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "swiglu"},
        {"num_query_groups": 2},
        {"kv_channels": 16},
        {"kv_channels": 4, "num_query_groups": 1, "activation": "swiglu"},
        {"mtp_num_layers": 2},
        {"mtp_num_layers": 1, "num_query_groups": 1, "activation": "swiglu"},
    ],
)
def test_variants_equal_three_forwards_counted_by_pytorch(changes: dict[str, Any]) -> None:
    config = ModelSettings.of(**(GPT | changes))
    assert iteration_flops(config, 2) == 3 * counted_by_pytorch(config, 2)


@pytest.mark.parametrize(
    ("window", "pattern"), [(0, (1,)), (7, (1, 0)), (30, (1,)), (31, (1,)), (9, (0,))]
)
def test_a_window_counts_in_both_directions(window: int, pattern: tuple[int, ...]) -> None:
    """As attention without one counts in full: pairs of positions that are close enough."""
    config = ModelSettings.of(
        **GPT, window_size=window, window_attn_skip_freq=LayerPattern(listed=pattern)
    )
    positions = torch.arange(32)
    close = int(((positions[:, None] - positions).abs() <= window).sum())
    has = [bool(pattern[layer % len(pattern)]) for layer in range(3)]
    hidden = sum(32**2 - close for own in has if own)
    attention = 3 * 4 * hidden * 64  # both products, forward and backward, of all heads together
    assert iteration_flops(ModelSettings.of(**GPT), 1) - iteration_flops(config, 1) == attention


def test_a_mixture_counts_the_parameters_that_a_token_passes() -> None:
    """By hand, for a token of a model like DeepSeek-V3: 6 FLOPs a parameter, and attention."""
    h, s, ffn, vocabulary, width, shared, experts, topk = 64, 32, 192, 1000, 48, 80, 16, 3
    mixture: dict[str, Any] = {
        "activation": "swiglu",
        "num_query_groups": 2,
        "num_experts": experts,
        "moe_layer_freq": LayerPattern(listed=(0, 1, 1)),
        "moe_ffn_hidden_size": width,
        "moe_router_topk": topk,
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": True,
        "mtp_num_layers": 1,
    }
    attention = h * 64 + 2 * h * 16 + 64 * h
    dense = attention + 3 * h * ffn
    routed = attention + h * experts + topk * 3 * h * width + 3 * h * shared + h
    further = 2 * h * h + routed + h * vocabulary
    passed = dense + 2 * routed + further + h * vocabulary
    scores = 4 * 4 * s * 64  # four layers, two products with s positions, 8 heads of 8
    assert iteration_flops(ModelSettings.of(**(GPT | mixture)), 5) == 5 * s * (
        6 * passed + 3 * scores
    )
    more = mixture | {"num_experts": 2 * experts}
    grown = iteration_flops(ModelSettings.of(**(GPT | more)), 5)
    only_router = 5 * s * 6 * 3 * h * experts
    assert grown - iteration_flops(ModelSettings.of(**(GPT | mixture)), 5) == only_router


@pytest.mark.parametrize("query_rank", [None, 24])
def test_multi_latent_attention_counts_what_pytorch_counts_of_the_plain_one(
    query_rank: int | None,
) -> None:
    h, s, ffn, layers, vocabulary, batch = 64, 32, 192, 3, 1000, 2
    latents: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": query_rank,
        "kv_lora_rank": 20,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 5,
        "kv_channels": 10,
    }
    options = GPTOptions(hidden_size=h, num_attention_heads=8, **latents)
    parameters = {
        f"{name}.weight": torch.randn(shape)
        for name, (is_there, shape) in plain_latent.shapes(options).items()
        if is_there
    }
    named = {f"attention.{name}": value for name, value in parameters.items()}
    x_bsh = torch.randn(batch, s, h)
    with FlopCounterMode(display=False) as counter:
        plain_latent.attention(named, "attention", x_bsh, options, lambda _, x: x)
    others = 2 * batch * s * h * (layers * 2 * ffn + vocabulary)
    expected = 3 * (layers * counter.get_total_flops() + others)
    assert iteration_flops(ModelSettings.of(**(GPT | latents)), batch) == expected
