"""A dry run names the host where kernels are so short that launching them may take longer."""

import re

import pytest
import torch
from command_lines import with_flags
from correctness.short_runs import Job, Layout
from harness.still_watch import still_watch
from reference.plain_gpt import GPTOptions

from megatron.planning.count.run import count_ranks
from megatron.planning.dry_run import dry_run
from megatron.planning.forecast_run import forecast_run
from megatron.planning.launch_pace import SHORT, LaunchPace, launch_pace
from megatron.planning.run_plan import make_run_plan
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.schedules.plan import plan_of_one
from megatron.simulator.costs.gpus import gpu


def run(tokens: int, layout: Layout, microbatches: int = 4, layers: int = 4) -> RunConfig:
    """Layers of 2048, in bf16."""
    options = GPTOptions(
        num_layers=layers,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=16,
        num_query_groups=16,
        kv_channels=128,
        max_position_embeddings=tokens,
        vocab_size=32_000,
    )
    job = Job(options, micro_batch_size=1, microbatches=microbatches, sequence=tokens)
    return job.config(layout, torch.bfloat16)


def lines_of_host(config: RunConfig) -> list[str]:
    text = "\n".join(dry_run(config, gpu("H200"), still_watch()))
    return [line for line in text.splitlines() if line.startswith("host: ")]


@pytest.mark.parametrize("layout", [Layout(1, "none"), Layout(2, "vocab-2", "zb-h1")], ids=str)
def test_short_kernels_name_the_host(layout: Layout) -> None:
    config = run(512, layout)
    [line] = lines_of_host(config)
    found = re.match(r"host: ([\d,]+) launches in ([\d.]+) (m?s), (\d+) us each: ", line)
    assert found is not None, line
    launches = int(found[1].replace(",", ""))
    seconds = float(found[2]) * (1e-3 if found[3] == "ms" else 1.0)
    assert seconds / launches == pytest.approx(1e-6 * int(found[4]), rel=0.05)
    assert "--cuda-graph-impl local" in line


def test_long_kernels_say_nothing() -> None:
    assert lines_of_host(run(16_384, Layout(1, "none"), layers=1)) == []


def test_launches_grow_with_microbatches_and_layers() -> None:
    def pace(microbatches: int, layers: int) -> LaunchPace:
        config = run(512, Layout(1, "none"), microbatches, layers)
        found = forecast_run(config, make_run_plan(config), gpu("H200"))
        return launch_pace(found.timeline, found.memories, microbatches)

    one, more, deeper = pace(2, 2), pace(4, 2), pace(2, 4)
    assert more.launches == 2 * one.launches > 0
    assert more.seconds == pytest.approx(2 * one.seconds)
    assert one.launches < deeper.launches < 2 * one.launches
    assert 1.2 * one.seconds < deeper.seconds


def test_updates_of_a_sharded_optimizer_are_no_time_of_launches() -> None:
    """They are in the program of an iteration, but no microbatch launches them."""
    both = []
    for sharded in (False, True):
        config = run(512, Layout(1, "none", replicas=2, sharded=sharded), microbatches=8)
        found = forecast_run(config, make_run_plan(config), gpu("H200"))
        both.append(launch_pace(found.timeline, found.memories, 4))
    assert both[0].launches == both[1].launches
    assert both[0].seconds == pytest.approx(both[1].seconds)


def test_every_counted_launch_of_a_rank_counts_once_a_microbatch() -> None:
    config = run(512, Layout(1, "none"))
    run_plan = make_run_plan(config)
    found = forecast_run(config, run_plan, gpu("H200"))
    [count] = count_ranks(config, plan_of_one(run_plan.plan), run_plan.layers)
    each = sum(
        times for own in count.passes.values() for work, times in own.parts for _ in work.launches
    )
    assert launch_pace(found.timeline, found.memories, 4).launches == 4 * each


def test_the_limit_is_of_the_mean() -> None:
    assert LaunchPace(10, 10 * SHORT).in_words(could_capture=True) is None
    assert LaunchPace(0, 0.0).in_words(could_capture=True) is None
    words = LaunchPace(1000, 0.99 * 1000 * SHORT).in_words(could_capture=True)
    assert words is not None
    assert words.startswith("host: 1,000 launches in ")
    assert LaunchPace(1, SHORT).in_words(could_capture=True) is None


FLAGS = (
    "--hidden-size 1024 --num-attention-heads 8 --num-layers 2 --seq-length 256 --vocab-size 1000 "
    "--micro-batch-size 1 --global-batch-size 2 --bf16 --lr 1e-4 --train-iters 1 --mock-data "
    "--dry-run --dry-run-gpu H200 --attention-dropout 0 --hidden-dropout 0"
)


@pytest.mark.parametrize(
    ("more", "ways_out"),
    [
        ("", ["larger microbatches help, and --cuda-graph-impl local"]),
        ("--hidden-dropout 0.1", ["larger microbatches help"]),
        ("--fp8-format hybrid", ["larger microbatches help, and --cuda-graph-impl local"]),
        ("--cuda-graph-impl local", []),
        ("--cuda-graph-impl local --hidden-dropout 0.1", ["larger microbatches help"]),
    ],
)
def test_graphs_are_advised_where_a_run_could_have_them(more: str, ways_out: list[str]) -> None:
    """With graphs the host launches a pass at once, so that it is not named."""
    config = parse(with_flags(FLAGS.split(), more.split()), 1)
    assert [line.rpartition("; ")[2] for line in lines_of_host(config)] == ways_out
