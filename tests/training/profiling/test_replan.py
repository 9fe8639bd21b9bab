"""A run measures its passes, plans with them, and trains on as it would have done anyway."""

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from correctness.rank_runs import CPU, Batches, ListLoader
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.layers.recompute import Recomputation
from megatron.parallel.groups import make_groups
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.timeline import Recorder
from megatron.schedules.check import check
from megatron.schedules.costs import UNIT_COSTS, Costs, Time
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.request import Request
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.compare import compare
from megatron.simulator.costs.cost_file import check_measured, load_costs
from megatron.simulator.scenario import Scenario, run
from megatron.simulator.simulate import Span, Timeline, simulate
from megatron.simulator.timeline_file import load_timeline
from megatron.training.iteration import run_iteration
from megatron.training.post_validated_step import make_train_step
from megatron.training.profiling.observation import Observation
from megatron.training.profiling.replan import (
    describe_replanned,
    describe_tried,
    end_trial,
    replan,
)
from megatron.training.setup import build_train_state

JOB = Job(GPTOptions(num_layers=4, vocab_size=61), microbatches=6, iterations=7)
TIMEOUT = timedelta(seconds=60)


@dataclass
class Run:
    """What one rank did.

    Attributes:
        losses: of every iteration.
        said: lines of the log.
        plan: at the end.
    """

    losses: list[float]
    said: list[str]
    plan: Plan


def run_observed(rank: int, world_size: int, *, config: RunConfig, batches: Batches) -> Run:
    grid = config.parallel.grid
    state = build_train_state(config, make_groups(grid, CPU, TIMEOUT))
    said: list[str] = []
    observation = Observation(
        config.log,
        state,
        len(batches) - 1,
        lambda costs: make_run_plan(config, costs),
        lambda text, **_: said.append(text),
    )
    replica = (state.groups.data.rank, state.groups.data.size)
    step, loader = make_train_step(config.optimizer, state), ListLoader(batches, replica)
    losses = []
    for iteration in range(len(batches)):
        observer = observation.begin(iteration)
        finished = run_iteration(step, config.optimizer, loader, state.groups, iteration, observer)
        assert finished is not None
        losses.append(finished.loss)
        observation.finished(iteration)
    state.pipeline.close()
    return Run(losses, said, state.plan)


def run_all(ranks: RankPool, layout: Layout, **log: Any) -> list[Run]:
    config = JOB.config(layout)
    config = replace(config, log=replace(config.log, **log))
    return ranks.run(run_observed, layout.ranks, config=config, batches=JOB.batches())


def assert_planned_with(costs: Costs | None, planned: Timeline, plan: Plan) -> None:
    """All passes of a kind, rank and chunk take one time in a plan: that of ``costs``, if given."""
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for span in planned.spans:
        if span.lane == "compute":
            times[span.kind, span.rank, span.chunk].append(span.end - span.start)
            if costs is not None:
                cost = costs.of_pass(plan, span.rank, Pass.parse(span.label))
                assert times[span.kind, span.rank, span.chunk][-1] == pytest.approx(cost)
    assert all(own == pytest.approx([own[0]] * len(own)) for own in times.values())


AHEAD = Layout(2, "vocab-2", "zb-h1", recomputation=Recomputation(group=1), recompute_ahead=1)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, "vocab-2", "auto"),
        Layout(2, "none"),
        pytest.param(AHEAD, marks=pytest.mark.full),
        pytest.param(replace(AHEAD, schedule="1f1b"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_run_is_measured_and_planned_anew_and_its_losses_stay(
    layout: Layout, ranks: RankPool, tmp_path: Path
) -> None:
    costs_file, timeline = tmp_path / "new" / "costs.json", tmp_path / "run.json"
    measured = run_all(
        ranks,
        layout,
        profile_schedule_start=2,
        profile_schedule_end=4,
        save_measured_costs=costs_file,
        replan=True,
        record_timeline=timeline,
    )
    plain = run_all(ranks, layout)
    assert measured[0].losses == pytest.approx(plain[0].losses, rel=1e-6)
    assert all(own.plan == measured[0].plan for own in measured)
    check(measured[0].plan)
    assert measured[0].plan.stages == plain[0].plan.stages
    assert measured[0].plan.recomputes == (layout.recompute_ahead is not None)
    of_measuring, *of_planning, of_timeline = measured[0].said
    assert of_measuring.startswith("iterations 2 to 3 measured: ")
    assert all(line.startswith("replan: ") for line in of_planning)
    assert len(of_planning) == 1 + ("measured next" in of_planning[0])
    assert of_timeline.startswith("timeline of the last iteration: ")
    file = load_costs(costs_file)
    assert file.layers is not None
    assert [sum(own) for own in file.layers] == [2, 2]
    split, chunks = plain[0].plan.split_backward, plain[0].plan.chunks
    own_kinds = {"W": split, "R": measured[0].plan.recomputes}
    assert set(file.costs.passes) >= {"F", "B"} | {kind for kind, own in own_kinds.items() if own}
    forward: Any = file.costs.passes["F"]
    assert [len(own) for own in forward] == [chunks] * 2
    collectives = {"C0", "C1", "CIF", "CIB"} if layout.vocabulary == "vocab-2" else set()
    assert set(file.costs.comms) - {"X", "G"} == collectives  # messages may come before the wait
    times: Any = file.costs.comms.values()
    assert min([1.0, *times]) > 0
    planned = load_timeline(tmp_path / "run.planned.json")
    compared = compare(planned, load_timeline(timeline))  # it refuses other passes than the plan's
    assert compared.total.real > 0
    assert_planned_with(
        file.costs if "the new plan stays" not in of_planning[-1] else None,
        planned,
        measured[0].plan,
    )
    trace = json.loads((tmp_path / "run.trace.json").read_text())
    assert {"F0", "wait"} <= {event.get("name") for event in trace["traceEvents"]} | {
        event.get("cat") for event in trace["traceEvents"]
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_updates_and_exchanges_with_replicas_are_measured_and_recorded(
    overlap: bool, ranks: RankPool, tmp_path: Path
) -> None:
    costs_file, timeline = tmp_path / "costs.json", tmp_path / "run.json"
    layout = Layout(2, "vocab-2", replicas=2, sharded=True, overlap=overlap)
    config = JOB.config(layout)
    log = replace(
        config.log,
        profile_schedule_start=2,
        profile_schedule_end=4,
        save_measured_costs=costs_file,
        record_timeline=timeline,
    )
    parallel = config.parallel
    gathering = replace(parallel.replicas, overlap_gather=overlap)
    config = replace(config, log=log, parallel=replace(parallel, replicas=gathering))
    ranks.run(run_observed, layout.world_size, config=config, batches=JOB.batches())
    costs = load_costs(costs_file).costs
    updates: Any = costs.passes["U"]
    assert len(updates) == 2
    assert min(updates) > 0
    assert costs.exchanges.keys() == {"RG", "AG"}
    recorded = load_timeline(timeline)
    planned = load_timeline(tmp_path / "run.planned.json")
    for found in (recorded, planned):
        for rank in range(2):
            kinds = [span.kind for span in found.spans if span.rank == rank]
            assert kinds.count("U") == kinds.count("RG") == kinds.count("AG") > 0
    for rank in range(2):
        for kind, exchange in costs.exchanges.items():
            own = [s for s in planned.spans if s.kind == kind and s.rank == rank]
            assert sum(s.end - s.start for s in own) == pytest.approx(exchange.times[rank])
    compare(planned, recorded)
    events = json.loads((tmp_path / "run.trace.json").read_text())["traceEvents"]
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert "communication: replicas" in threads


def test_the_simulator_reads_the_measured_costs(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    window = {"profile_schedule_start": 1, "profile_schedule_end": 2}
    run_all(ranks, Layout(2, "vocab-1"), save_measured_costs=path, **window)
    file = load_costs(path)
    check_measured(file, TREATMENTS["vocab-1"])
    with pytest.raises(ValueError, match="C2 of another treatment"):
        check_measured(file, TREATMENTS["vocab-2"])
    costs = file.costs
    done = run(Scenario(Request("1f1b", "vocab-1", 2, JOB.microbatches, costs)))
    assert done.timeline.end > 0


def test_nothing_is_observed_unless_asked_for(ranks: RankPool) -> None:
    for own in run_all(ranks, Layout(2, "none")):
        assert own.said == []


def lasting(seconds: float) -> list[Timeline]:
    """Timelines of iterations of which the median takes so long."""
    return [
        Timeline(1, (Span(0, "compute", "F0", "F", 0, 0, 1.0, 1.0 + time),))
        for time in (seconds / 2, seconds, seconds * 9)
    ]


def try_plans(
    rank: int, world_size: int, *, config: RunConfig, slow: Plan, costs: Costs
) -> list[Plan]:
    """Start from a slow plan; try one that turns out slower, one that is faster, and plan again."""
    state = build_train_state(config, make_groups(config.parallel.grid, CPU, TIMEOUT))
    state.pipeline.replace_plan(slow, costs)

    def plan_with(measured: Costs) -> RunPlan:
        return make_run_plan(config, measured)

    plans = []
    for measured in (3.0, 1.0):
        found, trial = replan(plan_with, state, costs, lasting(2.0))
        assert found.after < found.before
        assert "with the new plan (zb-h1); it is measured next" in describe_replanned(found)
        assert trial is not None
        plans.append(state.plan)
        tried = end_trial(trial, state, lasting(measured))
        assert [tried.before, tried.after] == pytest.approx([2.0, measured])
        assert ("new plan stays" in describe_tried(tried)) == (measured < 2)
        plans.append(state.plan)
    again, trial = replan(plan_with, state, costs, lasting(1.0))
    assert trial is None
    assert again.before == pytest.approx(found.after)
    assert "the plan stays" in describe_replanned(again)
    state.pipeline.close()
    return [*plans, state.plan]


def slow_plan(microbatches: int) -> Plan:
    row = tuple(Pass(kind, i) for i in range(microbatches) for kind in ("F", "B", "W"))
    return Plan((row, row), ((0, 0), (1, 0)), microbatches)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_plan_that_is_measured_to_be_faster_stays(replicas: int, ranks: RankPool) -> None:
    layout = Layout(2, "none", "zb-h1", replicas=replicas)
    slow = slow_plan(JOB.microbatches // replicas)
    costs = replace(UNIT_COSTS, comms={"RG": 5.0})
    for first, back, second, kept, last in ranks.run(
        try_plans, layout.world_size, config=JOB.config(layout), slow=slow, costs=costs
    ):
        assert first == second == kept == last != slow
        assert back == slow


def observe_unlike_replicas(rank: int, world_size: int, *, config: RunConfig, slow: Plan) -> Plan:
    """Measure a trial that is slower on the first replica, and faster on the second."""
    state = build_train_state(config, make_groups(config.parallel.grid, CPU, TIMEOUT))
    state.pipeline.replace_plan(slow, UNIT_COSTS)

    def plan_with(costs: Costs) -> RunPlan:
        return make_run_plan(config, costs)

    def measured(recorder: Recorder) -> Timeline:
        on_trial = state.plan != slow
        pace = 3.0 if on_trial == (state.groups.data.rank == 0) else 1.0
        times: dict[PassKind, Time] = dict.fromkeys(UNIT_COSTS.passes, pace)
        return simulate(state.pipeline.train_program, Costs(times))

    with patch.object(state.pipeline, "timeline", measured):
        observation = Observation(config.log, state, 9, plan_with, lambda *_, **__: None)
        for iteration in range(3):
            observation.begin(iteration)
            observation.finished(iteration)
            assert (state.plan == slow) == (iteration == 2)
    state.pipeline.close()
    return state.plan


def test_replicas_decide_alike_whatever_each_has_measured(ranks: RankPool) -> None:
    layout = Layout(2, "none", "zb-h1", replicas=2)
    config = JOB.config(layout)
    log = replace(config.log, profile_schedule_start=1, profile_schedule_end=2, replan=True)
    slow = slow_plan(JOB.microbatches // 2)
    config = replace(config, log=log)
    assert ranks.run(observe_unlike_replicas, 4, config=config, slow=slow) == [slow] * 4
