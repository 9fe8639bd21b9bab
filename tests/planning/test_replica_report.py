"""A dry run of replicas: bytes by hand, memory by the share of state, time by what hides."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from harness.still_watch import still_watch

from megatron.parallel.settings import ReplicaSettings
from megatron.planning.dry_run import dry_run
from megatron.planning.forecast_run import RunForecast, forecast_run
from megatron.planning.run_plan import make_run_plan
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.schedules.settings import PlanSettings
from megatron.simulator.costs.collective_time import NETWORK_STEP
from megatron.simulator.costs.gpus import GIB, gpu
from megatron.simulator.units import MEMORY, TIME

HIDDEN, LAYERS, VOCABULARY = 2048, 8, 128_000
WORDS = (
    f"--pipeline-model-parallel-size 4 --num-layers {LAYERS} --hidden-size {HIDDEN} "
    f"--num-attention-heads 16 --vocab-size {VOCABULARY} --vocab-parallel vocab-2 --bf16 "
    "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --lr 1e-4 "
    "--untie-embeddings-and-output-weights --train-iters 1 --dry-run --dry-run-replicas 16 "
    "--global-batch-size 128 --pipeline-schedule interleaved"
)
MATRICES = 12 * HIDDEN**2 * LAYERS + 2 * HIDDEN * VOCABULARY
"""Parameters without norms, biases and positions, which are less than 1 % of all."""


def run(flags: str = "") -> RunConfig:
    return parse(f"{WORDS} {flags}".split(), world_size=1, speak=False)


def forecast(flags: str = "", **changes: Any) -> RunForecast:
    config = run(flags)
    if changes:
        replicas = ReplicaSettings(**{**vars(config.parallel.replicas), **changes})
        config = replace(config, parallel=replace(config.parallel, replicas=replicas))
    return forecast_run(config, make_run_plan(config), gpu("H100"))


def test_a_rank_sends_what_a_ring_sends() -> None:
    whole = forecast()
    sharded = forecast("--use-distributed-optimizer")
    assert whole.exchanges is not None
    assert sharded.exchanges is not None
    own = MATRICES / 4
    assert whole.exchanges.bytes_sent == pytest.approx(2 * 15 / 16 * 4 * own, rel=0.02)
    assert sharded.exchanges.bytes_sent == pytest.approx(15 / 16 * (4 + 2) * own, rel=0.02)
    narrow = forecast("--grad-reduce-in-bf16").exchanges
    assert narrow is not None
    assert narrow.bytes_sent == pytest.approx(whole.exchanges.bytes_sent / 2)


@pytest.mark.parametrize("replicas", [2, 16, 64])
def test_a_sharded_optimizer_holds_its_share_of_the_state(replicas: int) -> None:
    """2 + 4 + 12 bytes a parameter become 2 + 4 + 12 / d."""
    whole = forecast(size=replicas)
    sharded = forecast(size=replicas, shard_optimizer=True)
    assert 0 <= sharded.padding < 0.03
    saved = [a - b for a, b in zip(static(whole), static(sharded), strict=True)]
    assert sum(saved) == pytest.approx(12 * (1 - 1 / replicas) * MATRICES, rel=0.02)


def static(found: RunForecast) -> list[float]:
    return [own.static for own in found.memories]


def test_without_replicas_nothing_is_exchanged() -> None:
    found = forecast(size=1)
    assert found.exchanges is None
    assert not found.hidden
    assert {span.kind for span in found.timeline.spans}.isdisjoint({"RG", "AG", "U"})
    assert found.outcome.step > 0


def test_overlapping_shortens_an_iteration_by_what_it_hides() -> None:
    apart = forecast("--use-distributed-optimizer")
    beside = forecast("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
    assert 0 <= apart.hidden["AG"].share < 0.1  # beside the updates of the other buckets
    assert 0.2 < beside.hidden["RG"].share <= 1
    assert 0.2 < beside.hidden["AG"].share <= 1
    assert beside.outcome.seconds < apart.outcome.seconds
    assert apart.outcome.step == beside.outcome.step == 0
    undoable = forecast("--use-distributed-optimizer --enable-optimizer-post-validation")
    assert undoable.outcome.step > undoable.hidden["RG"].alone / 4


def test_a_slower_link_takes_longer() -> None:
    usual, late = forecast(), forecast("--dry-run-replica-latency 1000")
    fast, slow = (
        forecast(f"--dry-run-replica-latency 0 --dry-run-replica-bandwidth {bandwidth}")
        for bandwidth in (50, 12.5)
    )
    assert slow.hidden["RG"].alone == pytest.approx(4 * fast.hidden["RG"].alone)
    assert usual.exchanges is not None
    steps = 2 * 15 * max(map(len, usual.exchanges.buckets))
    more = late.hidden["RG"].alone - usual.hidden["RG"].alone
    assert more == pytest.approx(steps * (1e-3 - NETWORK_STEP))


def test_the_report_says_it_and_what_other_flags_would_give() -> None:
    config = run("--use-distributed-optimizer --overlap-grad-reduce --dry-run-gpu H100")
    text = "\n".join(dry_run(config, gpu("H100")))
    assert "16 replicas of 4 x H100 (989 TFLOP/s, 80 GiB)\n" in text
    assert "at 80 GB/s and 14 us a step" in text
    assert re.search(
        r"^RG \(reduction over replicas\): [\d.]+ m?s, of which \d+% is hidden$", text, re.M
    )
    assert re.search(r"^padding of the buckets: 0\.\d\d%", text, re.M)
    now = size(*re.findall(r"^iteration ([\d.]+) (\w+)", text, re.M)[0])
    others = dict(alternatives(text))
    assert others.keys() == {
        "without --overlap-grad-reduce",
        "without --use-distributed-optimizer",
        "with --overlap-param-gather",
    }
    assert others["without --overlap-grad-reduce"][0] >= now
    assert others["with --overlap-param-gather"][0] <= now
    found = forecast("--overlap-grad-reduce --dry-run-gpu H100")
    seconds, peak = others["without --use-distributed-optimizer"]
    assert seconds == pytest.approx(found.outcome.seconds, rel=1e-3)
    assert peak == pytest.approx(max(found.outcome.peak), abs=0.05 * GIB)


def alternatives(text: str) -> Iterator[tuple[str, tuple[float, float]]]:
    lines = r"^(with\S* \S+): iteration ([\d.]+) (\w+), fullest rank ([\d.]+) (\w+)$"
    for named, *figures in re.findall(lines, text, re.M):
        yield named, (size(*figures[:2]), size(*figures[2:]))


def size(number: str, name: str) -> float:
    """In seconds or bytes."""
    units = {unit.name: unit.size for scale in (TIME, MEMORY) for unit in scale.units}
    return float(number) * units[name]


@pytest.mark.full
def test_what_would_fit_is_forecast_with_the_vocabulary_split() -> None:
    """With rows that do not split over the ranks where the run's own vocabulary is whole."""
    words = WORDS.replace("vocab-2", "none").replace("size 4", "size 3", 1)
    words = words.replace(f"--num-layers {LAYERS}", "--num-layers 6").replace("interleaved", "1f1b")
    config = parse(words.split(), world_size=1, speak=False)
    assert config.parallel.padded_vocab_size % 3
    whole = forecast_run(config, make_run_plan(config), gpu("H100"))
    share = 0.9 * max(whole.outcome.peak) / gpu("H100").usable
    small = replace(gpu("H100"), memory=share * gpu("H100").memory)
    planning = PlanSettings(advice_seconds=1e6)
    patient = replace(config, parallel=replace(config.parallel, planning=planning))
    text = "\n".join(dry_run(patient, small, still_watch()))
    assert re.search(r"^  --.*--pipeline-schedule \S+ --vocab-parallel vocab-2: ", text, re.M)


@pytest.mark.parametrize("words", ["", "--optimizer muon"])
def test_uneven_shares_of_whole_matrices_are_told(words: str) -> None:
    """Two layers on a rank, of 3, 1, 4 and 4 h x h: 24, which 16 replicas cannot share evenly."""
    config = run(f"--use-distributed-optimizer {words}")
    found = forecast_run(config, make_run_plan(config), gpu("H100"))
    text = "\n".join(dry_run(config, gpu("H100")))
    assert (found.uneven > 0.1) == bool(words)
    assert ("Muon's matrices are whole" in text) == bool(words)
