"""A run of a mixture that loads a dense checkpoint begins with the loss of the dense model."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from correctness.short_runs import Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from training.test_checkpointing import JOB, run_on_rank

from megatron.checkpoint.settings import CheckpointSettings

LLAMA = GPTOptions(
    num_layers=4,
    vocab_size=61,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
)
MIXTURE = replace(
    LLAMA, num_experts=8, moe_ffn_hidden_size=12, moe_router_topk=4, moe_layer_pattern=(0, 1)
)


def run(
    ranks: RankPool, options: GPTOptions, layout: Layout, exit_at: int = 1, **checkpoint: Any
) -> list[Any]:
    """What the ranks of a run say, or its error."""
    config = replace(JOB, options=options, dropout=0.0).config(layout)
    config = replace(
        config,
        train=replace(config.train, exit_interval=exit_at),
        checkpoint=CheckpointSettings(**checkpoint),
        log=replace(config.log, peak_tflops=1.0),
    )
    return ranks.run(run_on_rank, layout.world_size, config=config)


def first_loss(ended: list[Any]) -> float:
    found = re.search(r"lm loss: (\S+)", ended[0].said)
    assert found, ended[0].said
    return float(found[1])


LAYOUTS = [
    Layout(1, "none"),
    Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True),
    full(Layout(2, "none", "zb-v", replicas=2, sharded=True)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_first_loss_is_that_of_the_dense_model(
    layout: Layout, ranks: RankPool, tmp_path: Path
) -> None:
    run(ranks, LLAMA, Layout(2, "vocab-1"), exit_at=3, save=tmp_path / "dense")
    dense = run(ranks, LLAMA, Layout(1, "none"), load=tmp_path / "dense", finetune=True)
    where: dict[str, Any] = {"load": tmp_path / "dense", "save": tmp_path / "mixture"}
    mixture = run(ranks, MIXTURE, layout, upcycling=2, **where)
    assert first_loss(mixture) == pytest.approx(first_loss(dense), rel=1e-5)
    again = run(ranks, MIXTURE, layout, 2, upcycling=2, load=tmp_path / "mixture")
    assert "has experts already" in again[0].said
    assert "iteration 1" in again[0].said


def test_another_dense_model_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, LLAMA, Layout(1, "none"), save=tmp_path)
    [wide] = run(ranks, MIXTURE, Layout(1, "none"), load=tmp_path, upcycling=1)
    assert "of an MLP of width 24" in wide
    other = replace(MIXTURE, normalization="LayerNorm")
    [norm] = run(ranks, other, Layout(1, "none"), load=tmp_path, upcycling=2)
    assert "--normalization RMSNorm there, --normalization LayerNorm here" in norm
    half = replace(MIXTURE, ffn_hidden_size=48)
    [layers] = run(ranks, half, Layout(1, "none"), load=tmp_path, upcycling=2)
    assert "--ffn-hidden-size 24 there, --ffn-hidden-size 48 here" in layers
