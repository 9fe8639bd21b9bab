"""Checkpoints of experts spread over ranks: any layout loads them; no byte is there twice."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.test_layouts import everything
from correctness.rank_runs import CPU, Pieces, assemble
from correctness.short_runs import Layout
from correctness.test_expert_ranks import job_of
from correctness.test_experts import DEEPSEEK
from harness.marks import full
from harness.rank_pool import RankPool

from megatron.checkpoint import folder
from megatron.checkpoint.settings import CheckpointSettings
from megatron.layers.patterns import LayerPattern
from megatron.parallel.groups import make_groups
from megatron.run.run_config import RunConfig
from megatron.training.checkpointing import Checkpoints
from megatron.training.open_checkpoints import writer_hosts
from megatron.training.progress import Progress
from megatron.training.rendezvous import UserError
from megatron.training.setup import TrainState, build_train_state

JOB = job_of(DEEPSEEK)
FOUR = Layout(1, "none", replicas=4, experts=4)
TWO = Layout(2, "vocab-2", replicas=2, experts=2, sharded=True)
PARTS = Layout(1, "none", replicas=4, experts=2, expert_tensor=2, sharded=True)
TENSOR = Layout(1, "vocab-1", tensor=2, sequence=True, expert_tensor=1)
ALONE = Layout(1, "none")
LAYOUTS = (FOUR, TWO, PARTS, TENSOR, ALONE)


def config_of(layout: Layout, root: Path, *, seed: int, loads: bool) -> RunConfig:
    config = JOB.config(layout)
    where = CheckpointSettings(load=root) if loads else CheckpointSettings(save=root)
    return replace(config, checkpoint=where, train=replace(config.train, seed=seed))


def opened(config: RunConfig) -> tuple[TrainState, Checkpoints]:
    groups = make_groups(config.parallel.grid, CPU, timedelta(seconds=60))
    state = build_train_state(config, groups)
    hosts = writer_hosts(groups, config.checkpoint)
    return state, Checkpoints(config, state, hosts, lambda text: None)


def save_on_rank(rank: int, world_size: int, *, config: RunConfig) -> tuple[Pieces, int]:
    """Save a state in which all tensors differ; return it, and the bytes that this rank wrote."""
    state, checkpoints = opened(config)
    with torch.no_grad():
        for part in state.updated:
            kept = state.optimizer.tensors_of(part.name)
            kept["exp_avg"].copy_(3 * kept["weight"])
            kept["exp_avg_sq"].copy_(kept["weight"] ** 2)
    checkpoints.save(Progress(1, 1))
    state.pipeline.close()
    assert not checkpoints.fault
    assert config.checkpoint.save is not None
    file = folder.folder_of(config.checkpoint.save, 1) / f"__{rank}_0.distcp"
    return everything(state), file.stat().st_size


def load_on_rank(rank: int, world_size: int, *, config: RunConfig) -> Pieces:
    """Load into a state of other weights, and return it."""
    state, checkpoints = opened(config)
    assert checkpoints.load().iteration == 1
    state.pipeline.close()
    return everything(state)


def save(ranks: RankPool, layout: Layout, root: Path) -> tuple[dict[str, torch.Tensor], list[int]]:
    config = config_of(layout, root, seed=1, loads=False)
    saved = ranks.run(save_on_rank, layout.world_size, config=config)
    return assemble([held for held, _ in saved]), [size for _, size in saved]


@pytest.mark.parametrize("saver", [FOUR, *map(full, LAYOUTS[1:])], ids=str)
def test_every_layout_loads_what_another_has_saved(
    saver: Layout, ranks: RankPool, tmp_path: Path
) -> None:
    expected, _ = save(ranks, saver, tmp_path)
    for loader in LAYOUTS:
        config = config_of(loader, tmp_path, seed=2, loads=True)
        loaded = assemble(ranks.run(load_on_rank, loader.world_size, config=config))
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected), loader


def save_again_on_rank(
    rank: int, world_size: int, *, source: RunConfig, target: RunConfig
) -> Pieces:
    """Load into a state of other weights, save that state elsewhere, and return it."""
    state, loading = opened(source)
    assert loading.load().iteration == 1
    hosts = writer_hosts(state.groups, target.checkpoint)
    saving = Checkpoints(target, state, hosts, lambda text: None)
    saving.save(Progress(1, 1))
    state.pipeline.close()
    assert not saving.fault
    return everything(state)


def test_a_checkpoint_may_change_its_layout_again_and_again(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Experts on 4 ranks, on 1 and on 2, with other t, p and d each time: no bit changes."""
    expected, _ = save(ranks, FOUR, tmp_path / "0")
    for step, layout in enumerate((TENSOR, TWO, FOUR)):
        source = config_of(layout, tmp_path / str(step), seed=2 + step, loads=True)
        target = config_of(layout, tmp_path / str(step + 1), seed=2 + step, loads=False)
        found = assemble(
            ranks.run(save_again_on_rank, layout.world_size, source=source, target=target)
        )
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), layout


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "more": ({"num_experts": 16}, "--num-experts 8 there, --num-experts 16 here"),
    "narrower": (
        {"moe_ffn_hidden_size": 8},
        "--moe-ffn-hidden-size 12 there, --moe-ffn-hidden-size 8 here",
    ),
    "in other layers": ({"moe_layer_freq": LayerPattern(every=1)}, "--moe-layer-freq"),
    "of other groups": (
        {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
        "--moe-router-num-groups 4 there, --moe-router-num-groups 2 here",
    ),
    "without a bias": (
        {"moe_router_enable_expert_bias": False},
        "--moe-router-enable-expert-bias there, no --moe-router-enable-expert-bias here",
    ),
}
"""Experts that are not those of a checkpoint, and what is said of them."""


def fault_on_rank(rank: int, world_size: int, *, config: RunConfig) -> str:
    """Return the error of a load."""
    state, checkpoints = opened(config)
    with pytest.raises(UserError) as told:
        checkpoints.load()
    state.pipeline.close()
    return str(told.value)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_checkpoint_of_other_experts_is_refused_by_what_differs(
    kind: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Also where all tensors would fit, as with other groups."""
    save(ranks, ALONE, tmp_path)
    changed, words = OTHERS[kind]
    config = config_of(ALONE, tmp_path, seed=2, loads=True)
    [told] = ranks.run(
        fault_on_rank, 1, config=replace(config, model=config.model.replaced(**changed))
    )
    assert "is another one: " in told
    assert words in told
    assert "--use-checkpoint-args" in told


def test_experts_and_all_else_are_written_once_and_evenly(ranks: RankPool, tmp_path: Path) -> None:
    """Without a sharded optimizer, pairs of ranks have the same experts, and all have the rest."""
    _, [whole] = save(ranks, ALONE, tmp_path / "alone")
    layout = Layout(1, "none", replicas=4, experts=2)
    _, sizes = save(ranks, layout, tmp_path / "spread")
    assert sum(sizes) == pytest.approx(whole, rel=0.1)
    assert max(sizes) < 0.3 * whole
