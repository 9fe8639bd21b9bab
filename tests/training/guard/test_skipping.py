"""The samples of a skipped iteration are passed over as if the data did not have them."""

import io
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint.test_layouts import everything
from correctness.rank_runs import Pieces, make_pipeline_groups
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from training.test_checkpointing import Batches

from megatron.config.run_config import RunConfig
from megatron.training.loop import train
from megatron.training.open_data import Data
from megatron.training.setup import build_train_state

JOB = Job(GPTOptions(num_layers=2, vocab_size=61), microbatches=4, iterations=4)


def run_on_rank(
    rank: int, world_size: int, *, config: RunConfig, without: tuple[int, ...]
) -> tuple[Pieces, str]:
    """Train on the batches but some; return what the rank holds then, and what it printed."""
    state = build_train_state(config, make_pipeline_groups())
    batches = [batch for number, batch in enumerate(JOB.batches()) if number not in without]
    with redirect_stdout(io.StringIO()) as out:
        train(config, state, Data(Batches(batches)))
    return everything(state), out.getvalue()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("skipped", [(1,), (2, 3), (4,)], ids=str)
def test_weights_are_those_of_a_run_on_the_other_samples(
    skipped: tuple[int, ...], post_validation: bool, ranks: RankPool
) -> None:
    """At a constant rate, as the rate follows the samples."""
    config = JOB.config(Layout(2, "vocab-2"))
    optimizer = replace(
        config.optimizer,
        lr_decay_style="constant",
        lr_warmup_samples=0,
        post_validation=post_validation,
    )
    config = replace(
        config, optimizer=optimizer, log=replace(config.log, peak_tflops=1.0, log_interval=1)
    )
    guarded = replace(config, guard=replace(config.guard, skipped=frozenset(skipped)))
    shorter = replace(
        config, train=replace(config.train, train_iters=JOB.iterations - len(skipped))
    )
    without = tuple(number - 1 for number in skipped)
    found = ranks.run(run_on_rank, 2, config=guarded, without=())
    expected = ranks.run(run_on_rank, 2, config=shorter, without=without)
    for (held, _), (same, _) in zip(found, expected, strict=True):
        assert held.keys() == same.keys()
        for name, (_, parts) in held.items():
            for (_, value), (_, other) in zip(parts, same[name][1], strict=True):
                assert torch.equal(value, other), name
    said = found[0][1]
    for number in skipped:
        samples = f"samples {4 * number - 4}-{4 * number - 1}"
        assert f"iteration {number} is skipped (--iterations-to-skip): {samples} " in said
    flagged = [line.split("|") for line in said.splitlines() if "number of skipped" in line]
    counts = [int(fields[-3].split(":")[1]) for fields in flagged]
    assert counts == [int(number in skipped) for number in range(1, 5)]


def test_a_skipped_iteration_is_measured_by_the_next_one(ranks: RankPool, tmp_path: Path) -> None:
    config, costs, timeline = JOB.config(Layout(2, "vocab-2")), *map(tmp_path.joinpath, "ab")
    log = replace(
        config.log,
        peak_tflops=1.0,
        profile_schedule_start=1,
        profile_schedule_end=3,
        save_measured_costs=costs,
        record_timeline=timeline,
    )
    config = replace(config, log=log, guard=replace(config.guard, skipped=frozenset((2, 4))))
    (_, said), _ = ranks.run(run_on_rank, 2, config=config, without=())
    assert "iterations 1 to 3 measured: " in said
    assert costs.is_file()
    assert "--record-timeline: the last iteration is skipped" in said
    assert not timeline.exists()
