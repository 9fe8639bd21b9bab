"""Ranks whose copies differ are named before a save, whichever copies; equal ranks are left alone.

A run is harmed on one rank: after an iteration a weight is altered there, or its optimizer does
nothing. The rank that must be named follows from the harm.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
from correctness.eight_bit_runs import LLAMA, config_of
from correctness.rank_runs import ListLoader, connected
from correctness.short_runs import Job, Layout
from correctness.test_experts import MIXTRAL
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from training.test_checkpointing import Batches

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.optimizer.adamw import AdamW
from megatron.optimizer.mixed_precision import Step
from megatron.run.run_config import RunConfig
from megatron.training import loop
from megatron.training.guard import copies as copies_of_guard
from megatron.training.guard.copies import (
    BYTES_PER_SECOND,
    SHARE,
    Copies,
    Differing,
    Report,
    differing,
    iterations_apart,
    told,
)
from megatron.training.iteration import run_iteration
from megatron.training.loop import train
from megatron.training.metrics.introduce import introduce
from megatron.training.open_data import Data
from megatron.training.own_tokens import kept_tokens
from megatron.training.post_validated_step import make_train_step
from megatron.training.rendezvous import DriftError
from megatron.training.setup import TrainState, build_train_state

JOB: Final = Job(GPTOptions(num_layers=2, vocab_size=61), microbatches=4, iterations=4, sequence=8)
MIXED_JOB: Final = Job(MIXTRAL, microbatches=4, iterations=3, sequence=16)
EIGHT_BITS: Final = Job(replace(LLAMA, num_layers=2), microbatches=4, iterations=3, sequence=16)

Harm = Callable[[TrainState, int], None]
"""Changes the state of a rank, after an iteration."""


def idle_optimizer(state: TrainState, rank: int) -> None:
    """Stands for a rank whose steps change nothing."""


def no_step(self: AdamW, step: Step) -> None:
    """Take no step."""


def alter(*words: str) -> Harm:
    """Change one bit of the first parameter whose name contains all words."""
    return Altered(words)


class Altered:
    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words

    def __call__(self, state: TrainState, rank: int) -> None:
        for owned in state.pipeline.model.owned_parameters():
            if all(word in owned.name for word in self.words):
                bits = owned.parameter.detach().view(-1)[:1].view(torch.uint8)
                bits[0] ^= 1
                return
        raise LookupError(f"rank {rank} has no parameter of {self.words}")


def run_checked(
    rank: int,
    world_size: int,
    *,
    config: RunConfig,
    job: Job,
    harm: Harm | None = None,
    harmed: int = -1,
) -> str:
    """Train and check after every iteration; return what the check has said."""
    state = build_train_state(config, connected(config))
    loader = ListLoader(
        job.batches(), state.groups.replica, kept_tokens(config, state.groups.context.rank)
    )
    step = make_train_step(config.optimizer, state, config.log)
    copies, harms = Copies(state, None), harm is not None and rank == harmed
    copies.begin(0)
    with pytest.MonkeyPatch.context() as patch:
        try:
            for iteration in range(job.iterations):
                if harms and harm is idle_optimizer and iteration == 1:
                    patch.setattr(AdamW, "step", no_step)
                copies.note(run_iteration(step, config.optimizer, loader, state.groups, iteration))
                copies.note(step.settle())
                if harm is not None and harms:
                    harm(state, rank)
                copies.check(iteration)
        except DriftError as error:
            return str(error)
        finally:
            state.close()
    return ""


def saying(
    ranks: RankPool, layout: Layout, job: Job, harm: Harm, harmed: int, **changes: Any
) -> str:
    """What every rank says alike."""
    config = replace(job.config(layout), **changes)
    said = ranks.run(
        run_checked, layout.world_size, config=config, job=job, harm=harm, harmed=harmed
    )
    assert len(set(said)) == 1, said
    return str(said[0])


def test_a_replica_whose_optimizer_does_nothing_is_named(ranks: RankPool) -> None:
    said = saying(ranks, Layout(1, "none", replicas=2), JOB, idle_optimizer, 1)
    assert said.startswith("iteration 2: rank 1 holds another copy of "), said
    assert "than rank 0" in said


def test_a_shard_whose_optimizer_does_nothing_is_named(ranks: RankPool) -> None:
    """All replicas gather equal weights, and the copies agree."""
    said = saying(ranks, Layout(1, "none", replicas=2, sharded=True), JOB, idle_optimizer, 1)
    assert said.startswith("iteration 2: the optimizer of rank 1 has changed none"), said


def test_a_stage_whose_optimizer_does_nothing_is_named(ranks: RankPool) -> None:
    said = saying(ranks, Layout(2, "vocab-2"), JOB, idle_optimizer, 1)
    assert said.startswith("iteration 2: the optimizer of rank 1 has changed none"), said


@pytest.mark.parametrize(
    ("layout", "words", "harmed", "alike"),
    [
        (Layout(1, "none", replicas=2), ("mlp",), 1, "rank 0"),
        (Layout(1, "none", replicas=2, sharded=True), ("mlp",), 1, "rank 0"),
        (Layout(1, "none", tensor=2), ("norm", "layers"), 1, "rank 0"),
        (Layout(1, "none", tensor=2, sequence=True), ("final_layernorm",), 1, "rank 0"),
        (Layout(2, "none"), ("word_embeddings",), 1, "rank 0"),
        (Layout(1, "none", context=2), ("qkv",), 1, "rank 0"),
        (Layout(1, "none", replicas=3), ("mlp",), 0, "ranks 1-2"),
    ],
    ids=["replica", "gathered", "tensor norm", "final norm", "tied ends", "context", "majority"],
)
def test_a_rank_with_one_other_bit_is_named(
    layout: Layout, words: tuple[str, ...], harmed: int, alike: str, ranks: RankPool
) -> None:
    said = saying(ranks, layout, JOB, alter(*words), harmed)
    assert said.startswith(f"iteration 1: rank {harmed} holds another copy of "), said
    assert words[0] in said
    assert f" than {alike}, " in said


@pytest.mark.parametrize(("words", "alike"), [(("experts",), "rank 1"), (("router",), "ranks 0-2")])
def test_a_rank_with_another_expert_or_router_is_named(
    words: tuple[str, ...], alike: str, ranks: RankPool
) -> None:
    """Four replicas with two halves of the experts: ranks 1 and 3 hold the same ones."""
    layout = Layout(1, "none", replicas=4, experts=2)
    said = saying(ranks, layout, MIXED_JOB, alter(*words), 3)
    assert said.startswith("iteration 1: rank 3 holds another copy of "), said
    assert words[0] in said
    assert f" than {alike}, " in said


CLEAN: Final = {
    "one rank": (JOB, Layout(1, "none")),
    "tied copies": (JOB, Layout(2, "none")),
    "shards of the vocabulary": (JOB, Layout(2, "vocab-1", "zb-h1")),
    "replicas": (JOB, Layout(1, "none", replicas=2)),
    "sharded": (JOB, Layout(2, "vocab-2", replicas=2, sharded=True, overlap=True)),
    "tied copies, sharded": (JOB, Layout(2, "none", replicas=2, sharded=True)),
    "tensor": (JOB, Layout(1, "none", tensor=2)),
    "sequence": (JOB, Layout(1, "vocab-2", tensor=2, sequence=True, replicas=2)),
    "context": (JOB, Layout(1, "none", context=2, sharded=True)),
    "experts": (MIXED_JOB, Layout(1, "none", replicas=2, experts=2, sharded=True)),
    "tensor experts": (MIXED_JOB, Layout(1, "none", tensor=2, sequence=True, expert_tensor=1)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CLEAN)
def test_ranks_that_train_right_are_left_alone(
    name: str, dtype: torch.dtype, ranks: RankPool
) -> None:
    job, layout = CLEAN[name]
    config = job.config(layout, dtype)
    assert ranks.run(run_checked, layout.world_size, config=config, job=job) == (
        [""] * layout.world_size
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("harmed", [-1, 1])
def test_weights_gathered_in_eight_bits_are_compared(
    recipe: Any, harmed: int, ranks: RankPool
) -> None:
    layout = Layout(1, "none", replicas=2, sharded=True)
    eight_bits = EightBitSettings("e4m3" if recipe == "blockwise" else "hybrid", recipe)
    config = config_of(EIGHT_BITS, layout, eight_bits, torch.bfloat16)
    replicas = replace(config.parallel.replicas, gathers_eight_bits=True)
    config = replace(config, parallel=replace(config.parallel, replicas=replicas))
    said = ranks.run(run_checked, 2, config=config, job=EIGHT_BITS, harm=alter_bits, harmed=harmed)
    if harmed < 0:
        assert said == ["", ""]
        return
    assert said[0] == said[1]
    assert said[0].startswith("iteration 1: rank 1 holds another copy of "), said
    assert "(8 bits)" in said[0]


def alter_bits(state: TrainState, rank: int) -> None:
    """Change a bit of a weight that passes read in 8 bits alone."""
    for bucket in state.buckets:
        for _, tensors in bucket.read_by_passes():
            if "8 bits" in tensors:
                tensors["8 bits"].view(-1)[7] ^= 1
                return
    raise LookupError("no weight is gathered in 8 bits")


def train_whole(
    rank: int, world_size: int, *, config: RunConfig, harm: Harm | None, harmed: int
) -> str:
    """Train by the loop of a run; return how it ended."""
    state = build_train_state(config, connected(config))
    loader = Data(Batches(JOB.batches(), state.groups.replica))
    if harm is not None and rank == harmed:
        harm(state, rank)
    try:
        train(config, state, loader)
    except DriftError as error:
        return str(error)
    finally:
        if harm is not None and rank == harmed:
            state.close()
    return ""


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("interval", [None, 3, 0])
def test_nothing_is_saved_after_replicas_have_parted(
    interval: int | None, asynchronous: bool, tmp_path: Path, ranks: RankPool
) -> None:
    config = JOB.config(Layout(1, "none", replicas=2))
    config = replace(
        config,
        guard=replace(config.guard, check_weight_hash_across_dp_replicas_interval=interval),
        checkpoint=replace(config.checkpoint, save=tmp_path, async_save=asynchronous),
        log=replace(config.log, peak_tflops=1.0),
        train=replace(config.train, eval_interval=None),
    )
    said = ranks.run(train_whole, 2, config=config, harm=alter("mlp"), harmed=1)
    saved = any(path.is_dir() for path in tmp_path.iterdir())
    if interval == 0:
        assert (said, saved) == (["", ""], True)
        return
    assert said[0] == said[1]
    assert said[0].startswith(f"iteration {interval or JOB.iterations}: rank 1 holds another copy")
    assert not saved


def report(tensors: dict[int, int], seconds: float = 0.0) -> Report:
    keys, values = np.array(list(tensors), np.int64), np.array(list(tensors.values()), np.int64)
    return Report(keys, values, False, seconds, 1.0)


def test_most_holders_are_right_and_of_two_the_first() -> None:
    reports = [report({1: 5, 2: 8}), report({1: 6, 3: 9}), report({3: 9, 1: 6, 4: -1})]
    assert differing(reports) == [Differing(1, (0,), (1, 2))]
    assert differing([report({1: 5}), report({1: -6})]) == [Differing(1, (1,), (0,))]
    assert differing([report({}), report({})]) == []


def test_the_first_rank_that_differs_is_named_with_the_others() -> None:
    found = [Differing(7, (3,), (0, 1)), Differing(8, (2, 3), (0, 1)), Differing(9, (2,), (0,))]
    assert told(found, {7: "a", 8: "b", 9: "c"}).startswith(
        "rank 2 holds another copy of b and 1 other tensors than ranks 0-1"
    )
    assert told(found, {7: "a", 8: "b", 9: "c"}).endswith("; rank 3 differs too")


def test_checks_cost_a_thousandth() -> None:
    """A check of 0.5 s on the slowest rank, beside iterations of 2 s: every 250 iterations."""
    assert SHARE == 0.001
    assert iterations_apart([(0.1, 2.5), (0.5, 2.0)]) == 250
    assert iterations_apart([(1e-9, 2.0)]) == 1


def check_seldom(rank: int, world_size: int, *, config: RunConfig) -> list[int]:
    """The iterations, from 0, after which checks are due, if an iteration lasts 1000 s."""
    state = build_train_state(config, connected(config))
    copies, clock = Copies(state, None), 0.0

    def now() -> float:
        return clock

    due = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", now)
        copies.begin(0)
        for iteration in range(30):
            clock += 1000.0
            if copies.is_due(iteration):
                due.append(iteration)
                copies.check(iteration)
    state.close()
    return due


def test_the_first_check_follows_an_estimate_and_all_ranks_agree(ranks: RankPool) -> None:
    """It costs far less than 1 s here, a thousandth of an iteration, so every one is checked."""
    assert min(BYTES_PER_SECOND.values()) == 1e9
    config = JOB.config(Layout(1, "none", replicas=2))
    assert ranks.run(check_seldom, 2, config=config) == [list(range(10, 30))] * 2


def test_the_estimate_is_of_the_device_of_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU trains, and the host keeps 10 GB of the optimizer: 10 s, besides 2 GB on the GPU."""

    def of_size(gigabytes: float, device: str) -> Any:
        tensor = SimpleNamespace(
            device=torch.device(device), element_size=lambda: 4, numel=lambda: gigabytes * 1e9 / 4
        )
        return SimpleNamespace(tensor=tensor)

    held = [of_size(10, "cpu"), of_size(2, "cuda")]
    monkeypatch.setattr(copies_of_guard, "held_by", lambda state: held)
    groups = SimpleNamespace(world_hosts=None, device=torch.device("cuda"))
    state: Any = SimpleNamespace(groups=groups)
    assert Copies(state, None)._estimate() == pytest.approx(10 + 0.01, rel=1e-3)


def test_the_first_reading_is_no_part_of_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def slow(held: Any) -> list[int]:
        clock[0] += 1000.0
        return []

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(copies_of_guard, "held_by", lambda state: [])
    monkeypatch.setattr(copies_of_guard, "checksums", slow)
    state: Any = SimpleNamespace(groups=SimpleNamespace(world_hosts=None))
    copies = Copies(state, None)
    copies.begin(5)
    clock[0] += 20.0
    assert copies._seconds_of_iteration(15) == 2.0


def first_reading(rank: int, world_size: int, *, config: RunConfig) -> tuple[str, bool, float]:
    """Where a run takes its first reading, which sleeps, and the seconds of other pauses."""
    state = build_train_state(config, connected(config))
    found: list[Any] = []

    def begin(self: Copies, iteration: int) -> None:
        position = state.pipeline.position
        found.extend((position.phase, position.may_last))
        time.sleep(2.0)

    def kept(*arguments: Any) -> Any:
        found.append(introduce(*arguments))
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copies, "begin", begin)
        patch.setattr(loop, "introduce", kept)
        train(config, state, Data(Batches(JOB.batches(), state.groups.replica)))
    meter, phase, may_last = found
    return phase, may_last, meter._paused["other"]


def test_the_first_reading_is_a_phase_of_its_own_and_a_pause(ranks: RankPool) -> None:
    config = JOB.config(Layout(1, "none"))
    config = replace(
        config,
        log=replace(config.log, peak_tflops=1.0),
        train=replace(config.train, eval_interval=None),
    )
    [(phase, may_last, paused)] = ranks.run(first_reading, 1, config=config)
    assert (phase, may_last) == ("the first reading of the optimizer", True)
    assert paused >= 2.0
