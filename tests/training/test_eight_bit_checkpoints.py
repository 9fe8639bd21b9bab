"""A run in 8 bits goes on from its checkpoint with the scales that it had, in any layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from correctness.short_runs import Layout
from harness.marks import full
from harness.rank_pool import RankPool
from training.test_checkpointing import Ended, assert_same, losses
from training.test_precision_checkpoints import ended, prepared, whole_and_resumed

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.run.run_config import RunConfig

DELAYED = EightBitSettings("hybrid", fp8_amax_history_len=2, fp8_amax_compute_algo="max")
ANEW = "--fp8-recipe delayed begins anew"


def config_of(
    layout: Layout,
    eight_bits: EightBitSettings | None = DELAYED,
    dtype: torch.dtype = torch.float32,
    *,
    post_validation: bool = False,
) -> RunConfig:
    config = prepared(layout, dtype, post_validation=post_validation)
    return replace(
        config,
        train=replace(config.train, eight_bits=eight_bits),
        model=config.model.replaced(attention_dropout=0.0, hidden_dropout=0.0),
    )


def numbers(ended: Ended) -> list[float]:
    """The training losses as printed."""
    lines = [line for line in ended.said.splitlines() if "lm loss:" in line]
    return [float(line.split("lm loss:")[1].split()[0]) for line in lines]


@pytest.mark.parametrize(
    ("layout", "post_validation"),
    [(Layout(2, "vocab-2", replicas=2, sharded=True), False), full(Layout(2, "vocab-1"), True)],
    ids=str,
)
def test_it_goes_on_to_the_last_bit(
    layout: Layout, post_validation: bool, ranks: RankPool, tmp_path: Path
) -> None:
    config = config_of(layout, dtype=torch.bfloat16, post_validation=post_validation)
    whole, resumed = whole_and_resumed(ranks, config, tmp_path)
    assert_same(whole, resumed)
    assert ANEW not in resumed[0].said
    assert losses(resumed[0].said) == losses(whole[0].said)[-len(losses(resumed[0].said)) :]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, "vocab-2", tensor=2),
        full(Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True)),
        full(Layout(2, "none", replicas=2, sharded=True)),
        full(Layout(2, "vocab-2", context=2)),
    ],
    ids=str,
)
def test_scales_are_the_same_in_every_layout(
    layout: Layout, ranks: RankPool, tmp_path: Path
) -> None:
    """Sums in another order round few numbers to the next one; other scales would round all."""
    config = config_of(Layout(1, "none"))
    whole, resumed = whole_and_resumed(ranks, config, tmp_path, then=config_of(layout))
    assert ANEW not in resumed[0].said
    expected = numbers(whole[0])[3:]
    assert numbers(resumed[0]) == pytest.approx(expected, rel=2e-4)


def microscaled_on(layout: Layout) -> RunConfig:
    """Layers whose sizes are multiples of 32 on each of two ranks."""
    config = config_of(layout, EightBitSettings("hybrid", "mxfp8", wide_weight_gradients=True))
    model = config.model.replaced(
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
    )
    return replace(config, model=model)


@pytest.mark.parametrize(
    "layout",
    [Layout(1, "vocab-2", tensor=2), full(Layout(2, "vocab-2", "zb-h1", replicas=2, sharded=True))],
    ids=str,
)
def test_scales_of_32_numbers_leave_nothing_in_a_checkpoint(
    layout: Layout, ranks: RankPool, tmp_path: Path
) -> None:
    """Another layout goes on from the unrounded weights, with the groups of the whole matrices.

    The 12 tokens of a microbatch are no whole groups, so gradients of weights are in 16 bits.
    """
    whole, resumed = whole_and_resumed(
        ranks, microscaled_on(Layout(1, "none")), tmp_path, then=microscaled_on(layout)
    )
    assert numbers(resumed[0]) == pytest.approx(numbers(whole[0])[3:], rel=2e-4)


def latent_on(layout: Layout) -> RunConfig:
    """Multi-latent attention, which has five linear layers."""
    config = config_of(layout)
    latent = config.model.replaced(
        position_embedding_type="rope",
        multi_latent_attention=True,
        kv_channels=24,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
    )
    return replace(config, model=latent)


def test_scales_of_latent_attention_go_to_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    other = latent_on(Layout(1, "vocab-2", tensor=2, sequence=True))
    whole, resumed = whole_and_resumed(ranks, latent_on(Layout(1, "none")), tmp_path, then=other)
    assert ANEW not in resumed[0].said
    assert numbers(resumed[0]) == pytest.approx(numbers(whole[0])[3:], rel=2e-4)


def mixture_on(experts: int) -> RunConfig:
    """Four experts on as many ranks as given."""
    config = config_of(Layout(1, "none", "zb-h1", replicas=experts, experts=experts))
    mixture = config.model.replaced(num_experts=4, moe_ffn_hidden_size=32, moe_router_topk=2)
    return replace(config, model=mixture.replaced(activation="swiglu", add_bias_linear=False))


def test_scales_of_experts_go_to_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Experts on 2 ranks, then on 1, then on 4."""
    whole = ended(ranks, mixture_on(2))
    ended(ranks, mixture_on(2), 2, save=tmp_path / "2")
    second = ended(ranks, mixture_on(1), 4, load=tmp_path / "2", save=tmp_path / "1")
    last = ended(ranks, mixture_on(4), load=tmp_path / "1")
    assert ANEW not in second[0].said + last[0].said
    found = numbers(second[0]) + numbers(last[0])
    assert found == pytest.approx(numbers(whole[0])[2:], rel=2e-4)


def test_without_its_history_it_begins_anew_and_says_so(ranks: RankPool, tmp_path: Path) -> None:
    config = config_of(Layout(2, "vocab-2"))
    longer = config_of(Layout(2, "vocab-2"), replace(DELAYED, fp8_amax_history_len=3))
    whole, resumed = whole_and_resumed(ranks, config, tmp_path / "longer", then=longer)
    assert resumed[0].said.count(ANEW) == 1
    assert numbers(resumed[0]) == pytest.approx(numbers(whole[0])[3:], rel=5e-3)
    wide = config_of(Layout(2, "vocab-2"), None)
    _, resumed = whole_and_resumed(ranks, wide, tmp_path / "wide", then=config)
    assert resumed[0].said.count(ANEW) == 1
    _, resumed = whole_and_resumed(ranks, config, tmp_path / "narrow", then=wide)
    assert ANEW not in resumed[0].said, "in bf16 there is nothing to begin"
