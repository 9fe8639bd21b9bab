"""Biases of experts go on from a checkpoint in any layout, and only a step changes them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from correctness.short_runs import Layout
from harness.marks import full
from harness.rank_pool import RankPool
from training.test_checkpointing import Ended, assert_same, losses
from training.test_precision_checkpoints import SCALE, prepared, whole_and_resumed

from megatron.layers.patterns import LayerPattern
from megatron.run.run_config import RunConfig

RATE = 1 / 1024


def config_of(
    layout: Layout, dtype: torch.dtype = torch.float32, *, bias: bool = True, guess: bool = False
) -> RunConfig:
    config = prepared(layout, dtype, loss_scale=SCALE if dtype == torch.float16 else None)
    model = config.model.replaced(
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_experts=4,
        moe_layer_freq=LayerPattern(listed=(1, 0)),
        moe_ffn_hidden_size=12,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=bias,
        moe_router_bias_update_rate=RATE,
    )
    return replace(config, model=model, optimizer=replace(config.optimizer, post_validation=guess))


def biases(runs: list[Ended]) -> dict[str, list[float]]:
    """In units of the rate, by name."""
    return {
        name: (parts[0][1] / RATE).tolist()
        for own in runs
        for name, (_, parts) in own.held.items()
        if name.endswith("expert_bias")
    }


@pytest.mark.parametrize("guess", [full(False), True])
def test_a_run_with_overflows_goes_on_to_the_last_bit(
    guess: bool, ranks: RankPool, tmp_path: Path
) -> None:
    layout = Layout(2, "vocab-2", replicas=2, sharded=True)
    config = config_of(layout, torch.float16, guess=guess)
    whole, resumed = whole_and_resumed(ranks, config, tmp_path)
    assert_same(whole, resumed)
    assert losses(resumed[0].said) == losses(whole[0].said)[-len(losses(resumed[0].said)) :]
    found = biases(whole)
    assert sorted(found) == [
        f"weight.decoder.layers.{layer}.mlp.router.expert_bias" for layer in (0, 2)
    ]
    skipped = sum(map(int, re.findall(r"skipped iterations: +(\d+)", whole[0].said)))
    assert skipped > 0
    moved = [abs(own) for bias_e in found.values() for own in bias_e]
    assert max(moved) == 6 - skipped, "every step moves a bias by the rate, and nothing else does"


@pytest.mark.parametrize(
    "layout",
    [Layout(1, "vocab-2", context=2), full(Layout(2, "none", tensor=2, sequence=True))],
    ids=str,
)
def test_a_checkpoint_goes_on_in_another_layout(
    layout: Layout, ranks: RankPool, tmp_path: Path
) -> None:
    whole, resumed = whole_and_resumed(
        ranks, config_of(Layout(1, "none")), tmp_path, then=config_of(layout)
    )
    assert biases(resumed) == biases(whole)
    assert len(biases(whole)) == 2
