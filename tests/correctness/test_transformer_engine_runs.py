"""Runs by Transformer Engine's functions, for which a stand-in multiplies, on several ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from correctness.eight_bit_runs import LLAMA
from correctness.rank_runs import (
    Batches,
    RankRun,
    assemble,
    check_agreement,
    check_copies,
    train_on_rank,
)
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from kernels.engine_stand_in import installed
from reference import plain_gpt
from reference.plain_eight_bits import linear_of
from reference.plain_loss import loss_and_gradients

from megatron.layers.eight_bit_settings import EightBitSettings, Recipe
from megatron.layers.recompute import Recomputation
from megatron.run.run_config import RunConfig

WIDE = replace(LLAMA, num_layers=2, ffn_hidden_size=192)
"""Blocks of 128 end within a matrix, too."""
JOB = Job(WIDE, micro_batch_size=2, microbatches=4, iterations=3, sequence=16)

BATCHES: Batches = [
    [replace(each, loss_mask=torch.ones_like(each.loss_mask)) for each in batch]
    for batch in JOB.batches()
]
"""Nothing is masked: scales that are powers of two tell gradients from fractions of them."""
PARTS = Recomputation(parts=frozenset({"core_attn", "layernorm", "mlp"}))


def config_of(layout: Layout, recipe: Recipe, *, by_package: bool = True) -> RunConfig:
    config = JOB.config(layout, torch.float32)
    eight_bits = EightBitSettings("hybrid", recipe, transformer_engine=by_package)
    return replace(config, train=replace(config.train, eight_bits=eight_bits))


def train(rank: int, world_size: int, **given: Any) -> RankRun:
    with installed():
        return train_on_rank(rank, world_size, **given)


def trained(ranks: RankPool, config: RunConfig, batches: Batches = BATCHES) -> list[RankRun]:
    runs = ranks.run(train, config.parallel.grid.world_size, config=config, batches=batches)
    check_agreement(runs)
    check_copies(runs)
    return runs


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("blockwise", Layout(2, "vocab-2", "zb-h1")),
        ("mxfp8", Layout(2, "vocab-1", recomputation=PARTS)),
        pytest.param("tensorwise", Layout(2, "none"), marks=pytest.mark.full),
        pytest.param("mxfp8", Layout(1, "vocab-2", tensor=2), marks=pytest.mark.full),
        ("mxfp8", Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True)),
    ],
    ids=str,
)
def test_gradients_are_those_of_rounded_factors(
    recipe: Recipe, layout: Layout, ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a plain GPT whose linear layers round by themselves, and not of one that does not.

    Shards of tensor-parallel ranks end here where blocks of 32 do, so they have the same scales.
    """
    runs = trained(ranks, config_of(layout, recipe), BATCHES[:1])
    parameters = assemble([run.initial for run in runs])
    _, wide = loss_and_gradients(parameters, BATCHES[0], WIDE)
    monkeypatch.setattr(plain_gpt, "_linear", linear_of("hybrid", recipe))
    loss, expected = loss_and_gradients(parameters, BATCHES[0], WIDE)
    found = assemble([run.first_gradients for run in runs])
    assert runs[0].losses == pytest.approx([loss], rel=1e-4)
    for name, value in expected.items():
        error = float((found[name] - value).norm() / value.norm())
        rounding = float((wide[name] - value).norm() / value.norm())
        assert 0.01 < rounding < 0.5, (name, rounding)
        assert error < rounding / 20, (name, error, rounding)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_schedules_and_recomputation_change_no_bit(recipe: Recipe, ranks: RankPool) -> None:
    whole = trained(ranks, config_of(Layout(1, "none"), recipe))[0].losses
    for layout in (
        Layout(2, "none", "zb-h1"),
        Layout(2, "none", recomputation=Recomputation(group=1)),
    ):
        assert trained(ranks, config_of(layout, recipe))[0].losses == whole, str(layout)


def test_delayed_scales_train_as_with_the_own_kernels(ranks: RankPool) -> None:
    """The second iteration takes scales from the first; then roundings to other numbers add up.

    From then on the package rounds norms as it forms them, too.
    """
    layout, batches = Layout(2, "vocab-2"), BATCHES[:2]
    own = config_of(layout, "delayed", by_package=False)
    ours = trained(ranks, own, batches)[0]
    theirs = trained(ranks, config_of(layout, "delayed"), batches)[0]
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-6)
    assert theirs.gradient_norms == pytest.approx(ours.gradient_norms, rel=1e-3)
