"""A dry run names the host where kernels are so short that launching them may take longer."""

import re
from dataclasses import replace

import pytest
import torch
from command_lines import with_flags
from correctness.short_runs import Job, Layout
from harness.still_watch import still_watch
from reference.plain_gpt import GPTOptions

from megatron.planning.count.run import count_ranks
from megatron.planning.dry_run import dry_run
from megatron.planning.forecast_run import forecast_run
from megatron.planning.launch_pace import MEASURED_PACE, SHORT, LaunchPace, launch_pace
from megatron.planning.run_plan import make_run_plan
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.schedules.passes import PassKind
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
        return launch_pace(found.timeline, found.counts, microbatches)

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
        both.append(launch_pace(found.timeline, found.counts, 4))
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
    assert launch_pace(found.timeline, found.counts, 4).launches == 4 * each


def test_a_captured_pass_is_one_launch_beside_its_copies() -> None:
    """Each of F, B, S, T, IF and IB is a replay, with copies into its memory and out of it.

    C1 and messages are launched as before. So the launches grow no more with the layers.
    """
    layout = Layout(2, "vocab-2")

    def of(layers: int, *, captures: bool) -> tuple[LaunchPace, dict[PassKind, int]]:
        config = run(512, layout, layers=layers)
        config = replace(config, train=replace(config.train, captures_passes=captures))
        run_plan = make_run_plan(config)
        counts = count_ranks(config, plan_of_one(run_plan.plan), run_plan.layers)
        found = forecast_run(config, run_plan, gpu("H200"))
        each = {kind: own.launched for (kind, _), own in counts[1].passes.items()}
        return launch_pace(found.timeline, found.counts, 4), each

    pace, launched = of(4, captures=True)
    deeper, also = of(8, captures=True)
    plain, before = of(4, captures=False)
    assert launched == also == {"F": 3, "B": 3, "S": 3, "T": 2 + 1, "IF": 3, "IB": 3}
    assert launched.keys() == before.keys()
    assert before["S"] > launched["S"]
    assert before["IF"] > launched["IF"]
    assert pace.launches == deeper.launches < 0.5 * plain.launches
    assert plain.kernels == plain.launches < pace.kernels < deeper.kernels


def test_the_limit_is_of_the_mean() -> None:
    assert LaunchPace(10, 10 * SHORT).in_words() is None
    assert LaunchPace(0, 0.0).in_words() is None
    words = LaunchPace(1000, 0.99 * 1000 * SHORT).in_words()
    assert words is not None
    assert words.startswith("host: 1,000 launches in ")
    assert LaunchPace(1, SHORT).in_words() is None


def test_graphs_save_the_time_of_launches_on_a_slow_host() -> None:
    """No more than until the GPU is busy all the time."""
    pace = LaunchPace(1000, 0.5 * 1000 * MEASURED_PACE)
    few, many = LaunchPace(100, pace.seconds), LaunchPace(980, pace.seconds)
    assert words_of(pace, few).endswith("(100 launches; on that host 50% less time)")
    assert words_of(pace, many).endswith("(980 launches; on that host 2% less time)")
    busy = LaunchPace(1000, 0.99 * 1000 * SHORT)
    left = LaunchPace(100, busy.seconds)
    assert words_of(busy, left).endswith("--cuda-graph-impl local (100 launches)")


def words_of(pace: LaunchPace, replayed: LaunchPace) -> str:
    words = pace.in_words(replayed)
    assert words is not None
    return words


FLAGS = (
    "--hidden-size 1024 --num-attention-heads 8 --num-layers 2 --seq-length 256 --vocab-size 1000 "
    "--micro-batch-size 1 --global-batch-size 2 --bf16 --lr 1e-4 --train-iters 1 --mock-data "
    "--dry-run --dry-run-gpu H200 --attention-dropout 0 --hidden-dropout 0"
)


@pytest.mark.parametrize(
    ("more", "advised"),
    [
        ("", True),
        ("--hidden-dropout 0.1", False),
        ("--fp8-format hybrid", True),
        ("--cuda-graph-impl local --hidden-dropout 0.1", False),
    ],
)
def test_graphs_are_advised_where_a_run_could_have_them(more: str, advised: bool) -> None:
    [line] = lines_of_host(parse(with_flags(FLAGS.split(), more.split()), 1))
    found = re.search(
        r"; larger microbatches help(, and --cuda-graph-impl local \([\d,]+ launches; on that host "
        r"\d\d% less time\))?$",
        line,
    )
    assert found is not None, line
    assert (found[1] is not None) == advised


def test_a_run_with_graphs_says_what_its_host_launches() -> None:
    flags = with_flags(FLAGS.split(), ["--cuda-graph-impl", "local"])
    [line] = lines_of_host(parse(flags, 1))
    found = re.match(r"host: (\d+) launches in .* for (\d+) kernels, because passes are", line)
    assert found is not None, line
    assert 2 * int(found[1]) < int(found[2])
