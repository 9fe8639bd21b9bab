"""The rank that computes for longer is named, with its passes, whatever the ranks wait for."""

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from correctness.rank_runs import CPU, Batches, ListLoader, connected
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from hypothesis import given
from hypothesis import strategies as st
from reference.plain_gpt import GPTOptions

from megatron.run.records import RecordSettings
from megatron.run.run_config import RunConfig
from megatron.runtime.stage_passes import StagePasses
from megatron.runtime.timeline import Recorder
from megatron.schedules.costs import Costs
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import Pass
from megatron.training.iteration import run_iteration
from megatron.training.loop import train
from megatron.training.metrics.peak_memory import peak_memory
from megatron.training.metrics.rank_figures import gather_figures, pass_times
from megatron.training.metrics.records import RankFigures, Slowest
from megatron.training.metrics.stragglers import (
    Stragglers,
    Times,
    compare,
    planned_times,
    report,
)
from megatron.training.open_data import Data
from megatron.training.own_tokens import kept_tokens
from megatron.training.post_validated_step import make_train_step
from megatron.training.setup import build_train_state

Work = Callable[[StagePasses, Pass], None]

SLEEP = 0.2  # seconds of a pass, where all passes of an iteration take a tenth of it


def by_rank(*times: Times) -> dict[int, Times]:
    return dict(enumerate(times))


def together(count: int) -> dict[int, int]:
    return dict.fromkeys(range(count), 0)


@given(st.integers(2, 6), st.integers(0, 5), st.floats(1.5, 9.0), st.floats(1e-6, 1e6), st.data())
def test_the_slow_rank_is_first_whatever_the_work_and_the_unit_of_the_plan(
    count: int, slow: int, factor: float, unit: float, data: st.DataObject
) -> None:
    """Its F is slow; kinds have paces of their own, which the plan does not know."""
    slow %= count
    work = st.fixed_dictionaries({kind: st.floats(0.1, 10) for kind in "FBT"})
    planned = by_rank(*(data.draw(work) for _ in range(count)))
    pace = {"F": 1.0, "B": 1.7, "T": 0.4}
    measured = {
        rank: {kind: unit * own[kind] * pace[kind] for kind in own} for rank, own in planned.items()
    }
    measured[slow] = {**measured[slow], "F": factor * measured[slow]["F"]}
    first, *others = compare(measured, planned, together(count))
    assert (first.rank, first.passes) == (slow, "F")
    assert first.slowness > 1
    assert all(other.slowness <= 1 + 1e-9 for other in others)
    if count > 2:
        own = measured[slow]
        usual = {**own, "F": own["F"] / factor}
        assert first.slowness == pytest.approx(sum(own.values()) / sum(usual.values()))
        assert first.of_passes == pytest.approx(factor)


def test_unequal_stages_are_no_stragglers() -> None:
    compared = compare(
        by_rank({"F": 1.0}, {"F": 2.0}, {"F": 3.0}),
        by_rank({"F": 10}, {"F": 20}, {"F": 30}),
        together(3),
    )
    assert [own.slowness for own in compared] == pytest.approx([1, 1, 1])


def test_ranks_of_one_stage_are_compared_with_each_other_if_the_plan_is_wrong() -> None:
    """Ranks 3, 4 and 5 take twice as long as the plan thinks; rank 1 is slow among its likes."""
    measured = by_rank(*({"B": own} for own in (1.0, 1.3, 1.0, 2.0, 2.0, 2.1)))
    stages = dict(enumerate((0, 0, 0, 1, 1, 1)))
    planned = by_rank(*[{"B": 1.0}] * 6)
    first, second = compare(measured, planned, stages)[:2]
    assert (first.rank, second.rank) == (1, 5)
    assert [first.slowness, second.slowness] == pytest.approx([1.3, 1.05])


def test_a_kind_that_few_ranks_have_is_compared_among_them() -> None:
    measured = by_rank({"F": 1.0}, {"F": 1.0, "T": 5.0}, {"T": 5.0})
    assert [own.slowness for own in compare(measured, measured, together(3))] == [1, 1, 1]


def test_a_kind_without_a_plan_on_one_rank_alone_is_usual_there() -> None:
    """The unit of the plan (here 1e13 a second) must not meet the number 1."""
    measured = by_rank({"F": 1.0, "IF": 1e-4}, {"F": 1.0, "IF": 1e-3}, {"F": 1.2, "IF": 1e-3})
    planned = by_rank({"F": 1e13, "IF": 0.0}, {"F": 1e13, "IF": 1e10}, {"F": 1e13, "IF": 1e10})
    first, *others = compare(measured, planned, together(3))
    assert (first.rank, first.passes) == (2, "F")
    assert [own.slowness for own in others] == pytest.approx([1, 1])


def test_passes_for_which_the_plan_expects_nothing_are_taken_as_alike() -> None:
    measured = by_rank({"IF": 1.0}, {"IF": 1.0}, {"IF": 3.0})
    found = compare(measured, by_rank({}, {"IF": 0.0}, {}), together(3))
    assert [(own.rank, own.slowness) for own in found] == [(2, 3), (0, 1), (1, 1)]


def test_the_plan_expects_every_pass_of_a_row() -> None:
    costs = Costs({"F": 1, "B": 2, "S": 3, "T": 4, "IF": 0.5, "IB": 0.25}, {})
    plan = make_plan("1f1b", "vocab-2", 3, 5)
    assert planned_times(plan, costs) == [
        {
            kind: sum(costs.of_pass(plan, rank, item) for item in row if item.kind == kind)
            for kind in {item.kind for item in row}
        }
        for rank, row in enumerate(plan.rows)
    ]


def slowest(slowness: float) -> Slowest:
    return Slowest(13, 1, 0, 0, 3, slowness, 1.5, 1.5 / slowness, "B", 1.75, 1.25, 1.0)


def figures(slowness: Mapping[int, float]) -> Sequence[RankFigures]:
    return [RankFigures(rank, 0, slowness=own) for rank, own in slowness.items()]


def test_a_line_names_each_straggler() -> None:
    lines = list(report(7, figures({1: 1.0, 5: 1.2, 13: 1.5, 14: 1.3}), slowest(1.5)))
    assert lines == [
        "straggler in iteration 7: rank 13 (pp 1, tp 0, cp 0, dp 3) computes for 1500.0 ms, 1.50 "
        "times as long as usual, B 1.75 times",
        "straggler in iteration 7: rank 14, 1.30 times",
        "straggler in iteration 7: rank 5, 1.20 times",
    ]


def test_many_stragglers_take_few_lines() -> None:
    many = figures({rank: 1.5 - rank / 1000 for rank in range(100)})
    lines = list(report(7, many, slowest(1.5)))
    assert len(lines) == 9
    assert lines[-1] == "and 92 more stragglers in iteration 7"


def test_without_a_straggler_the_slowest_rank_is_told_and_without_times_nothing() -> None:
    [line] = report(7, figures({13: 1.1}), slowest(1.1))
    assert line.startswith("no straggler in iteration 7; the slowest is rank 13 (pp 1, ")
    assert not list(report(7, (), None))


def slowed(work: Work, is_slow: bool) -> Work:
    def slow(passes: StagePasses, item: Pass) -> None:
        time.sleep(SLEEP * is_slow)
        work(passes, item)

    return slow


def train_with_a_straggler(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches, slow: int
) -> tuple[tuple[RankFigures, ...], Slowest | None]:
    """Two iterations, of which the second is timed; each B of one rank sleeps."""
    with patch.object(StagePasses, "backward", slowed(StagePasses.backward, rank == slow)):
        state = build_train_state(config, connected(config))
    recorder, step = Recorder(rank, CPU), make_train_step(config.optimizer, state)
    kept = kept_tokens(config, state.groups.context.rank)
    loader = ListLoader(batches, state.groups.replica, kept)
    for number, observer in enumerate((None, recorder)):
        run_iteration(step, config.optimizer, loader, state.groups, number, observer)
    figures = gather_figures(state.groups, peak_memory(CPU), pass_times(recorder))
    compared = Stragglers(state).compared(figures)
    state.close()
    return compared


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, "vocab-2"),
        Layout(1, "vocab-2", tensor=2),
        Layout(1, "vocab-1", "zb-h1", tensor=2, sequence=True),
        Layout(1, "none", context=2),
        Layout(1, "none", context=2, exchange="p2p"),
        Layout(1, "none", context=2, exchange="a2a"),
        Layout(1, "none", replicas=2, experts=2, dispatcher="alltoall"),
        Layout(1, "none", replicas=2, experts=2, dispatcher="allgather"),
        Layout(1, "none", replicas=3),
    ],
    ids=str,
)
def test_a_rank_that_sleeps_in_its_passes_is_named_and_the_ranks_that_wait_for_it_are_not(
    layout: Layout, ranks: RankPool
) -> None:
    options = GPTOptions(num_layers=4, vocab_size=61)
    if layout.experts > 1:
        options = replace(options, num_experts=4, moe_ffn_hidden_size=12, moe_router_topk=2)
    job = Job(options, microbatches=6, iterations=2, sequence=12)
    config, batches, slow = job.config(layout), job.batches(), layout.world_size - 1
    results = ranks.run(
        train_with_a_straggler, layout.world_size, config=config, batches=batches, slow=slow
    )
    figures, found = results[0]
    assert results[slow][1] == found
    assert found is not None
    place = config.parallel.grid.coordinates(slow)
    own = (found.rank, found.pipeline, found.tensor, found.context, found.data)
    assert own == (slow, place.pipeline, place.tensor, place.context, place.data)
    slept = 6 / layout.replicas * SLEEP
    assert (found.passes, found.seconds >= slept) == ("B", True)
    # The others lasted as long wherever they wait for the slow one, but computed for less.
    assert all(sum(own.computing.values()) < slept for own in figures[:slow])
    assert found.slowness == max(own.slowness or 0 for own in figures) > 1.2
    assert found.slowness == found.seconds / found.usual
    assert found.fastest <= found.median <= found.seconds


def whole_run(rank: int, world_size: int, *, config: RunConfig, batches: Batches) -> str:
    """Return what rank 0 prints; each B of rank 1 sleeps."""
    with patch.object(StagePasses, "backward", slowed(StagePasses.backward, rank == 1)):
        state = build_train_state(config, connected(config))
    with redirect_stdout(io.StringIO()) as out:
        train(config, state, Data(ListLoader(batches), {}, None))
    return out.getvalue()


@pytest.mark.parametrize("flag", [False, True])
def test_records_name_the_slowest_rank_and_lines_do_if_they_are_asked_for(
    flag: bool, ranks: RankPool, tmp_path: Path
) -> None:
    job = Job(GPTOptions(num_layers=4, vocab_size=61), microbatches=3, iterations=4)
    config, path = job.config(Layout(1, "vocab-2", tensor=2)), tmp_path / "run.jsonl"
    records = RecordSettings(log_jsonl=path)
    config = replace(
        config,
        train=replace(config.train, final_sets=()),
        log=replace(config.log, peak_tflops=1.0, log_interval=2, records=records),
        guard=replace(config.guard, log_straggler=flag),
    )
    said = ranks.run(whole_run, 2, config=config, batches=job.batches())[0]
    lines = [own for own in said.splitlines() if own.startswith("straggler in iteration")]
    assert len(lines) == 2 * flag
    assert all(f"{2 * at}: rank 1 (pp 0, tp 1, " in line for at, line in enumerate(lines, 1))
    found = [json.loads(line) for line in path.read_text().splitlines()]
    slowest = [own["slowest"] for own in found if own["event"] == "iterations"]
    assert [(own["rank"], own["tensor"], own["passes"]) for own in slowest] == [(1, 1, "B")] * 2
