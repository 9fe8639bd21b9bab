"""Checkpoints of runs that gather weights in 8 bits: those of runs that gather 16 bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from correctness.rank_runs import assemble
from correctness.short_runs import Layout
from harness.marks import full
from harness.rank_pool import RankPool
from training.test_checkpointing import Ended, losses
from training.test_eight_bit_checkpoints import DELAYED, config_of, numbers
from training.test_precision_checkpoints import ended

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.run.run_config import RunConfig

BLOCKWISE = EightBitSettings("e4m3", "blockwise")
D2_P2 = Layout(2, "vocab-2", replicas=2, sharded=True, overlap=True)


def run_of(layout: Layout, eight_bits: EightBitSettings = BLOCKWISE, *, gathers: bool) -> RunConfig:
    config = config_of(layout, eight_bits, torch.bfloat16)
    replicas = replace(config.parallel.replicas, gathers_eight_bits=gathers)
    return replace(config, parallel=replace(config.parallel, replicas=replicas))


def assert_same(one: list[Ended], other: list[Ended]) -> None:
    """Masters and moments; ranks may have other shards of them."""
    wanted, found = (assemble([own.held for own in each]) for each in (one, other))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("eight_bits", [BLOCKWISE, DELAYED], ids=["blockwise", "delayed"])
def test_it_goes_on_to_the_last_bit(
    eight_bits: EightBitSettings, ranks: RankPool, tmp_path: Path
) -> None:
    whole = ended(ranks, run_of(D2_P2, eight_bits, gathers=False))
    first = ended(ranks, run_of(D2_P2, eight_bits, gathers=True), 3, save=tmp_path)
    resumed = ended(ranks, run_of(D2_P2, eight_bits, gathers=True), load=tmp_path)
    assert_same(whole, resumed)
    assert losses(first[0].said) + losses(resumed[0].said) == losses(whole[0].said)


@pytest.mark.parametrize(
    "then",
    [
        Layout(1, "none", replicas=2, sharded=True),
        full(Layout(2, "none", replicas=2, sharded=True)),
        full(Layout(1, "vocab-2", tensor=2, replicas=2, sharded=True, sequence=True)),
    ],
    ids=str,
)
def test_another_layout_loads_it(then: Layout, ranks: RankPool, tmp_path: Path) -> None:
    """Weights were written by a run with the flag or without, and are loaded with it or without."""
    found = []
    for saves in (True, False):
        folder = tmp_path / str(saves)
        ended(ranks, run_of(D2_P2, gathers=saves), 3, save=folder)
        for loads in (True, False):
            found.append(ended(ranks, run_of(then, gathers=loads), load=folder))
    [alone] = ended(ranks, run_of(Layout(1, "none"), gathers=False), load=tmp_path / "True")
    for other in found[1:]:
        assert_same(found[0], other)
        assert losses(other[0].said) == losses(found[0][0].said)
    assert numbers(alone) == pytest.approx(numbers(found[0][0]), rel=2e-3)
