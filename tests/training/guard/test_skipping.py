"""The samples of a skipped iteration are passed over as if the data did not have them."""

import io
import re
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.test_layouts import everything
from correctness.rank_runs import Pieces, make_pipeline_groups
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from training.test_checkpointing import Batches

from megatron.checkpoint.settings import CheckpointSettings
from megatron.run.run_config import RunConfig
from megatron.training.loop import train
from megatron.training.open_data import Data
from megatron.training.setup import build_train_state

JOB = Job(GPTOptions(num_layers=2, vocab_size=61), microbatches=4, iterations=4)


FALLING: dict[str, Any] = {
    "lr": 1e-2,
    "min_lr": 0.0,
    "lr_decay_style": "linear",
    "lr_decay_samples": 16,
    "lr_warmup_samples": 0,
}
"""To 0 over four iterations of four samples."""


def run_on_rank(
    rank: int, world_size: int, *, config: RunConfig, without: tuple[int, ...] = ()
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
    """With a rate that falls: it follows the samples that led to a step, as in Megatron-LM."""
    config = JOB.config(Layout(2, "vocab-2"))
    optimizer = replace(config.optimizer, **FALLING, post_validation=post_validation)
    config = replace(
        config, optimizer=optimizer, log=replace(config.log, peak_tflops=1.0, log_interval=1)
    )
    guarded = replace(config, guard=replace(config.guard, iterations_to_skip=skipped))
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


def printed_rates(config: RunConfig, ranks: RankPool) -> list[float]:
    """The rates of the next step, which a run prints after its iterations."""
    config = replace(config, log=replace(config.log, peak_tflops=1.0, log_interval=1))
    [(_, said)] = ranks.run(run_on_rank, 1, config=config)
    return [float(found) for found in re.findall(r"learning rate: (\S+)", said)]


@pytest.mark.parametrize("loads_moments", [True, False])
def test_a_run_goes_on_with_the_rate_that_skipped_iterations_have_left(
    loads_moments: bool, ranks: RankPool, tmp_path: Path
) -> None:
    """Iterations 2 and 3 lead to no step, so iteration 4 steps with 3/4 of the first rate."""
    config = JOB.config(Layout(1, "none"))
    config = replace(config, optimizer=replace(config.optimizer, **FALLING))
    config = replace(config, guard=replace(config.guard, iterations_to_skip=(2, 3)))
    expected = [7.5e-3, 7.5e-3, 7.5e-3, 5e-3]
    assert printed_rates(config, ranks) == pytest.approx(expected)
    first = replace(
        config,
        train=replace(config.train, exit_interval=3),
        checkpoint=CheckpointSettings(save=tmp_path),
    )
    assert printed_rates(first, ranks) == pytest.approx(expected[:3])
    load = CheckpointSettings(load=tmp_path, load_optimizer=loads_moments)
    assert printed_rates(replace(config, checkpoint=load), ranks) == pytest.approx(expected[3:])
    anew = replace(config, checkpoint=replace(load, finetune=True))
    assert printed_rates(anew, ranks) == pytest.approx(expected)


@pytest.mark.parametrize(("interval", "losses"), [(1, 2), (2, 2), (4, 1)])
def test_the_line_of_skipped_iterations_has_no_loss(
    interval: int, losses: int, ranks: RankPool
) -> None:
    config = JOB.config(Layout(1, "none"))
    log = replace(config.log, peak_tflops=1.0, log_interval=interval)
    config = replace(config, log=log, guard=replace(config.guard, iterations_to_skip=(2, 3)))
    [(_, said)] = ranks.run(run_on_rank, 1, config=config)
    lines = [line for line in said.splitlines() if "number of skipped" in line]
    assert len(lines) == 4 // interval
    assert sum("| lm loss: " in line for line in lines) == losses
    assert not any(re.search("nan|inf", line.split("number of")[0], re.I) for line in lines)
    for line in lines:
        ends_with_a_step = any(f"iteration        {n}/" in line for n in (1, 4))
        assert ("| grad norm: " in line) == ends_with_a_step
        assert "number of nan iterations:   0" in line


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
    config = replace(config, log=log, guard=replace(config.guard, iterations_to_skip=(2, 4)))
    (_, said), _ = ranks.run(run_on_rank, 2, config=config, without=())
    assert "iterations 1 to 3 measured: " in said
    assert costs.is_file()
    assert "--record-timeline: the last iteration is skipped" in said
    assert not timeline.exists()
