"""A checkpoint that was tampered with is loaded right, or refused in one clear error."""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from correctness.rank_runs import make_pipeline_groups
from correctness.short_runs import Layout
from harness.rank_pool import RankPool
from training.checkpoint_mutations import mutate, trap_of
from training.test_checkpointing import JOB, run

from megatron.checkpoint.settings import CheckpointSettings
from megatron.run.run_config import RunConfig
from megatron.training.checkpointing import Checkpoints
from megatron.training.rendezvous import UserError
from megatron.training.setup import TrainState, build_train_state

LAYOUT = Layout(2, "vocab-2")
ITERATIONS = (2, 4, 6)


class Loaded(NamedTuple):
    """What a rank has after loading: how far the run was, a digest of all tensors, the steps."""

    iteration: int
    consumed_samples: int
    steps: int
    digest: str


def fill(state: TrainState, value: float) -> None:
    """Overwrite everything that is loaded."""
    with torch.no_grad():
        for entry in state.parameters:
            for tensor in state.optimizer.tensors_of(entry.name).values():
                tensor.fill_(value)


def digest(state: TrainState) -> str:
    """Return a digest of all tensors of this rank."""
    sha256 = hashlib.sha256()
    for entry in state.parameters:
        for kind, tensor in sorted(state.optimizer.tensors_of(entry.name).items()):
            for _, part in entry.parts(tensor):
                sha256.update(f"{kind}.{entry.name}".encode())
                sha256.update(part.detach().contiguous().numpy().tobytes())
    return sha256.hexdigest()


def load_on_rank(
    rank: int, world_size: int, *, config: RunConfig, loads: Sequence[CheckpointSettings]
) -> list[Loaded | str]:
    """Load one after another into the same state, and return how each ended."""
    groups = make_pipeline_groups()
    state = build_train_state(config, groups)
    found: list[Loaded | str] = []
    for load in loads:
        fill(state, 7.5)
        one = replace(config, checkpoint=load)
        try:
            checkpoints = Checkpoints(one, state, groups.world_hosts, lambda _: None)
            progress = checkpoints.load()
        except UserError as error:
            found.append(str(error))
        else:
            how_far = progress.iteration, progress.consumed_samples
            found.append(Loaded(*how_far, state.optimizer.steps, digest(state)))
    state.pipeline.close()
    return found


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Path:
    """Checkpoints of three iterations of a job of two ranks."""
    root = tmp_path_factory.mktemp("good") / "checkpoints"
    run(ranks, LAYOUT, save=root, save_interval=2)
    return root


def load(ranks: RankPool, loads: Sequence[CheckpointSettings]) -> list[tuple[Loaded | str, ...]]:
    """Return how each load ended, by rank."""
    config = JOB.config(LAYOUT, torch.bfloat16)
    by_rank = ranks.run(load_on_rank, LAYOUT.ranks, config=config, loads=loads)
    return list(zip(*by_rank, strict=True))


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 200), marks=pytest.mark.full)], ids=str
)
def test_mutated_checkpoints_load_right_or_end_in_one_clear_error(
    seeds: range, good: Path, ranks: RankPool, tmp_path: Path
) -> None:
    right = load(ranks, [CheckpointSettings(load=good, ckpt_step=n) for n in ITERATIONS])
    assert [both[0].iteration for both in right if isinstance(both[0], Loaded)] == [*ITERATIONS]
    roots = {seed: tmp_path / str(seed) for seed in seeds}
    names = {}
    for seed, root in roots.items():
        shutil.copytree(good, root)
        names[seed] = mutate(root, seed)
    ends = load(
        ranks,
        [CheckpointSettings(load=root, exit_on_missing_checkpoint=True) for root in roots.values()],
    )
    wrong = {}
    for (seed, root), end in zip(roots.items(), ends, strict=True):
        said = str(end[0])
        clear = end == (said, said) and said.startswith(f"--load {root}: ")
        if not (end in right or (clear and f"{root}/iter_" in said and "\n" not in said)):
            wrong[f"{seed}: {names[seed]}"] = end
        assert not trap_of(root).exists(), f"{seed}: {names[seed]}: a file was executed"
    assert not wrong
