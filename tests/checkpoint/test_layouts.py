"""What one layout has saved, every layout loads, to the last bit."""

import errno
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from correctness.rank_runs import (
    CPU,
    Pieces,
    assemble,
    make_pipeline_groups,
    parameter_values,
    pieces,
)
from correctness.schedule_cases import layout
from correctness.short_runs import Job
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.checkpoint import folder, storage
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.common import read_common
from megatron.checkpoint.share import part_of, share
from megatron.checkpoint.storage import OtherModelError, SaveError
from megatron.checkpoint.train_tensors import tensors_of
from megatron.parallel.box import Box, Piece, check_tiling, whole
from megatron.parallel.groups import ConnectedAxis, Groups, make_groups
from megatron.run.run_config import RunConfig
from megatron.training.setup import TrainState, build_train_state

LAYOUTS = {
    "alone": (1, 1, "none", "1f1b", False),
    "tied copies": (1, 2, "none", "1f1b", False),
    "replicas of tied copies": (2, 2, "redis", "interleaved", True),
    "folded": (1, 3, "vocab-1", "zb-v", False),
    "interlaced": (1, 4, "interlaced", "1f1b", False),
    "replicas": (2, 2, "vocab-2", "zb-h1", False),
    "sharded optimizer": (4, 1, "none", "1f1b", True),
}
"""Replicas, pipeline ranks, treatment, schedule, and whether replicas share the optimizer."""


def ranks_of(name: str) -> int:
    replicas, pipeline, *_ = LAYOUTS[name]
    return replicas * pipeline


def connected(config: RunConfig) -> Groups:
    return make_groups(config.parallel.grid, CPU, timedelta(seconds=60))


def everything(state: TrainState) -> Pieces:
    """All tensors of this rank with their boxes; padding is zero."""
    held: Pieces = {}
    for part in state.updated:
        for kind, tensor in state.optimizer.tensors_of(part.name).items():
            boxes = [(piece.box, tensor[piece.local.slices].clone()) for piece in part.pieces]
            held[f"{kind}.{part.name}"] = part.global_shape, boxes
    for own in state.pipeline.model.owned_buffers():
        shape = tuple(own.buffer.shape)
        held[f"weight.{own.name}"] = shape, [(Box.whole(shape), own.buffer.clone())]
    return held


def save_on_rank(rank: int, world_size: int, *, config: RunConfig, root: Path) -> Pieces:
    """Save a state in which all tensors differ, each rank its share, and return it."""
    groups = connected(config)
    state = build_train_state(config, groups)
    with torch.no_grad():
        for part in state.updated:
            kept = state.optimizer.tensors_of(part.name)
            kept["exp_avg"].copy_(3 * kept["weight"])
            kept["exp_avg_sq"].copy_(kept["weight"] ** 2)
    state.optimizer.loaded(steps=7)
    counted = [part for part in state.updated if part.counts_in_norm]
    tensors = tensors_of(counted, state.optimizer)
    tensors = share(tensors, part_of(tensors, groups.world_hosts))
    storage.write(root, 10, tensors, {"steps": state.optimizer.steps}, groups.world_hosts)
    state.pipeline.close()
    return everything(state)


def load_on_rank(
    rank: int, world_size: int, *, config: RunConfig, root: Path
) -> tuple[Pieces, Pieces, bool]:
    """Load into a state of other weights; return the optimizer's tensors, and the model's weights.

    And whether the own weights are the rounded masters.
    """
    groups = connected(config)
    state = build_train_state(config, groups)
    where = folder.folder_of(root, folder.candidates(root)[0])
    assert storage.check_files(where, groups.world_hosts) is None
    storage.read(where, tensors_of(state.updated, state.optimizer), groups.world_hosts)
    state.optimizer.loaded(read_common(where)["steps"])
    assert state.optimizer.steps == 7
    rounded = all(
        torch.equal(
            part.weight, state.optimizer.tensors_of(part.name)["weight"].to(part.weight.dtype)
        )
        for part in state.updated
    )
    state.pipeline.close()
    return everything(state), pieces(state, parameter_values), rounded


DENSE = GPTOptions(num_layers=12, vocab_size=37, swiglu=True)
MIXTURE = replace(
    DENSE,
    add_bias_linear=False,
    num_experts=4,
    moe_layer_pattern=(0, 1),
    moe_ffn_hidden_size=12,
    moe_shared_expert_intermediate_size=8,
)
MODELS = {"dense": DENSE, "mixture": MIXTURE}


def config_of(
    name: str,
    tied: bool,
    folder: Path,
    dtype: torch.dtype,
    seed: int,
    tensor: str = "1",
    model: str = "dense",
) -> RunConfig:
    replicas, ranks, treatment, schedule, sharded = LAYOUTS[name]
    options = replace(MODELS[model], tie_embeddings=tied)
    spread = replace(
        layout(schedule, treatment, ranks, folder),
        replicas=replicas,
        sharded=sharded,
        tensor=int(tensor[0]),
        sequence=tensor.endswith("s"),
    )
    config = Job(options, microbatches=12).config(spread, dtype)
    return replace(config, train=replace(config.train, seed=seed))


PAIRS = [(saver, tied) for saver in LAYOUTS for tied in (True, False)]


@pytest.mark.parametrize(
    ("saver", "tied"),
    [
        pytest.param(*pair, marks=[] if number == 3 else pytest.mark.full)
        for number, pair in enumerate(PAIRS)
    ],
)
def test_every_layout_loads_what_another_has_saved(
    saver: str, tied: bool, ranks: RankPool, tmp_path: Path
) -> None:
    """Weights and moments to the last bit; a model in bf16 gets the rounded weights."""
    saved = ranks.run(
        save_on_rank,
        ranks_of(saver),
        config=config_of(saver, tied, tmp_path, torch.float32, seed=1),
        root=tmp_path,
    )
    expected = assemble(saved)
    for number, loader in enumerate(LAYOUTS):
        dtype = torch.bfloat16 if number % 2 else torch.float32
        config = config_of(loader, tied, tmp_path, dtype, seed=2)
        loaded = ranks.run(load_on_rank, ranks_of(loader), config=config, root=tmp_path)
        assert all(rounded for _, _, rounded in loaded)
        found = assemble([held for held, _, _ in loaded])
        weights = assemble([weights for _, weights, _ in loaded])
        assert all(
            torch.equal(weight, expected[f"weight.{name}"].to(dtype))
            for name, weight in weights.items()
        )
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


TENSOR_PARALLEL = [("alone", "2"), ("tied copies", "2s"), ("replicas", "1"), ("alone", "4")]
"""Layouts, and on each of its ranks t that share layers; s: and the sequence."""


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("saver", "tensor"),
    [
        pytest.param(*pair, marks=pytest.mark.full if number else [])
        for number, pair in enumerate(TENSOR_PARALLEL)
    ],
)
def test_ranks_that_share_layers_save_and_load_like_all_others(
    saver: str, tensor: str, model: str, ranks: RankPool, tmp_path: Path
) -> None:
    config = config_of(saver, True, tmp_path, torch.float32, seed=1, tensor=tensor, model=model)
    size = config.parallel.grid.world_size
    expected = assemble(ranks.run(save_on_rank, size, config=config, root=tmp_path))
    reader = dcp.FileSystemReader(folder.folder_of(tmp_path, 10))
    for name, saved in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in saved.chunks]
        check_tiling(tuple(saved.size), boxes)  # copies are written once
        assert torch.Size(expected[name].shape) == saved.size
    for loader, others in TENSOR_PARALLEL:
        config = config_of(
            loader, True, tmp_path, torch.float32, seed=2, tensor=others, model=model
        )
        size = config.parallel.grid.world_size
        loaded = ranks.run(load_on_rank, size, config=config, root=tmp_path)
        found = assemble([held for held, _, _ in loaded])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert all(rounded for _, _, rounded in loaded)


def test_the_vocabulary_is_saved_without_padding_and_tied_matrices_once(
    ranks: RankPool, tmp_path: Path
) -> None:
    config = config_of("tied copies", True, tmp_path, torch.float32, seed=1)
    ranks.run(save_on_rank, 2, config=config, root=tmp_path)
    reader = dcp.FileSystemReader(folder.folder_of(tmp_path, 10))
    saved = reader.read_metadata().state_dict_metadata
    matrix = saved["weight.embedding.word_embeddings.weight"]
    assert isinstance(matrix, TensorStorageMetadata)
    assert matrix.size[0] == 37
    assert len(matrix.chunks) == 1
    assert not any("output_layer" in name for name in saved)


def fail_on_rank(rank: int, world_size: int, *, config: RunConfig, root: Path) -> str:
    """Load a model of another size, and return what it says."""
    groups = make_pipeline_groups()
    state = build_train_state(config, groups)
    where = folder.folder_of(root, 10)
    with pytest.raises(OtherModelError) as told:
        storage.read(where, tensors_of(state.updated, state.optimizer), groups.world_hosts)
    state.pipeline.close()
    return str(told.value)


def test_another_model_is_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    saved = config_of("tied copies", True, tmp_path, torch.float32, seed=1)
    ranks.run(save_on_rank, 2, config=saved, root=tmp_path)
    wider = replace(saved, model=replace(saved.model, vocab_size=38))
    for said in ranks.run(fail_on_rank, 2, config=wider, root=tmp_path):
        assert "weight.embedding.word_embeddings.weight has shape [37, " in said
        assert "but this model needs [38, " in said
    untied = replace(saved, model=saved.model.replaced(tie_embeddings=False))
    for said in ranks.run(fail_on_rank, 2, config=untied, root=tmp_path):
        assert "has no tensor weight.output_layer.weight" in said


def cannot_write(rank: int, world_size: int, *, root: Path, error: OSError) -> str:
    """Save where rank 1 cannot write; every rank is told."""
    groups = make_pipeline_groups()
    tensor = BoxedTensor(torch.ones(2, 3), (4, 3), (Piece(Box((2 * rank, 0), (2, 3)), (0, 0)),))
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(error))
        with pytest.raises(SaveError) as told:
            storage.write(root, 20, {"weight.x": tensor}, {}, groups.world_hosts)
    return str(told.value)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(), "rank 1: OSError"),
    ],
    ids=["full disk", "no reason"],
)
def test_what_cannot_be_written_ends_the_save_and_not_the_last_checkpoint(
    error: OSError, reason: str, ranks: RankPool, tmp_path: Path
) -> None:
    saved = config_of("tied copies", True, tmp_path, torch.float32, seed=1)
    ranks.run(save_on_rank, 2, config=saved, root=tmp_path)
    for said in ranks.run(cannot_write, 2, root=tmp_path, error=error):
        assert "iter_0000020 was not written" in said
        assert reason in said
    assert not folder.partial_of(tmp_path, 20).exists(), "it takes up what is left of the disk"
    assert folder.candidates(tmp_path) == [10]
    assert folder.problem_of(folder.folder_of(tmp_path, 10)) is None


def test_copies_on_the_host_are_written_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_gpu() -> None:
        raise AssertionError("the thread's current GPU is not the rank's own")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", no_gpu)
    tensor = BoxedTensor(torch.ones(4, 3), (4, 3), whole((4, 3)))
    storage.write(tmp_path, 10, {"weight.x": tensor}, {}, ConnectedAxis("world", 0, (0,)))
    assert folder.complete(tmp_path) == [10]
