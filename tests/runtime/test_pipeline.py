"""What a real run does is what the plan says: in flight, in order, and on record."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from correctness.rank_runs import CPU, Batches, make_pipeline_groups
from correctness.short_runs import LAYOUTS, Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from schedules.cases import expected_passes

from megatron.run.run_config import RunConfig
from megatron.runtime.batch import to_device
from megatron.runtime.timeline import Recorder
from megatron.schedules.costs import UNIT_COSTS
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan
from megatron.simulator.simulate import Timeline
from megatron.simulator.timeline_file import load_timeline, save_timeline
from megatron.training.setup import build_train_state

OPTIONS = GPTOptions(num_layers=4, vocab_size=61)
JOB = Job(OPTIONS, microbatches=9, iterations=2)


@dataclass(frozen=True)
class Observed:
    """What one rank saw of two iterations.

    Attributes:
        plan: the plan that ran.
        peak_in_flight: of the store.
        left_in_store: values in the store afterwards.
        timeline: of the second iteration, from all ranks.
        loss_parts: this rank's part of the loss of each iteration.
    """

    plan: Plan
    peak_in_flight: int
    left_in_store: int
    timeline: Timeline
    loss_parts: tuple[float, float]


def run_recorded(rank: int, world_size: int, *, config: RunConfig, batches: Batches) -> Observed:
    state = build_train_state(config, make_pipeline_groups())
    pipeline = state.pipeline
    recorder = Recorder(rank, CPU)
    first = pipeline.train(to_device(batches[0], CPU), 0)
    state.groups.world.barrier()
    recorder.begin()
    second = pipeline.train(to_device(batches[1], CPU), 1, recorder)
    assert first is not None
    assert second is not None
    timeline = pipeline.timeline(recorder)
    pipeline.close()
    peak, left = pipeline.store.peak_in_flight, len(pipeline.store)
    return Observed(state.plan, peak, left, timeline, (float(first), float(second)))


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def layout(request: pytest.FixtureRequest) -> Layout:
    drawn: Layout = request.param
    return drawn


@pytest.fixture(scope="module")
def observed(layout: Layout, ranks: RankPool) -> list[Observed]:
    """Two iterations of a job in which every pipeline can fill."""
    return ranks.run(run_recorded, layout.ranks, config=JOB.config(layout), batches=JOB.batches())


@pytest.mark.one_in(4)
def test_activations_in_flight_are_those_of_the_plan(observed: list[Observed]) -> None:
    assert [own.peak_in_flight for own in observed] == in_flight(observed[0].plan)


def test_barriers_cost_one_microbatch_each(layout: Layout, observed: list[Observed]) -> None:
    barriers = {"none": 0, "vocab-2": 1, "vocab-1": 2}[layout.vocabulary]
    assert observed[0].peak_in_flight == layout.ranks + barriers


def test_nothing_is_left_in_the_store(observed: list[Observed]) -> None:
    assert [own.left_in_store for own in observed] == [0] * len(observed)


def test_only_the_last_rank_has_a_part_in_the_loss(observed: list[Observed]) -> None:
    assert all(own.loss_parts == (0, 0) for own in observed[:-1])
    assert all(part > 0 for part in observed[-1].loss_parts)


def test_every_rank_has_the_same_plan(observed: list[Observed]) -> None:
    assert all(own.plan == observed[0].plan for own in observed)


def test_timeline_has_every_pass_once_in_the_order_of_the_plan(observed: list[Observed]) -> None:
    plan = observed[0].plan
    for rank, row in enumerate(plan.rows):
        spans = [s for s in observed[0].timeline.spans if (s.rank, s.lane) == (rank, "compute")]
        assert [span.label for span in spans] == [str(item) for item in row]
        assert {span.label for span in spans} == set(map(str, expected_passes(plan, rank)))
        edges = [edge for span in spans for edge in (span.start, span.end)]
        assert edges == sorted(edges), "two passes of a rank overlap"
        assert edges[0] >= 0


def test_timeline_has_every_collective_on_every_rank_in_one_order(
    layout: Layout, observed: list[Observed]
) -> None:
    kinds = {"none": [], "vocab-1": ["CIF", "C1", "C2"], "vocab-2": ["CIF", "C1"]}[
        layout.vocabulary
    ]
    if layout.ranks > 1 and kinds:
        kinds = [*kinds, "C0", "CIB"]  # broadcasts, which a single rank has nobody for
    orders = []
    for rank in range(layout.ranks):
        mine = [s for s in observed[0].timeline.spans if (s.rank, s.lane) == (rank, "comm")]
        spans = [span for span in mine if span.kind != "RG"]
        found = Counter((span.kind, span.microbatch) for span in spans)
        assert found == Counter((kind, i) for kind in kinds for i in range(JOB.microbatches))
        orders.append([span.label for span in spans])
    assert all(order == orders[0] for order in orders)


def test_the_ends_add_up_the_gradients_of_their_copies_once(
    layout: Layout, observed: list[Observed]
) -> None:
    """After all passes of the rank, and only where two ranks have a copy."""
    spans = observed[0].timeline.spans
    added = [span for span in spans if (span.lane, span.kind) == ("comm", "RG")]
    two = layout.ranks > 1 and layout.vocabulary == "none"
    assert sorted(span.rank for span in added) == ([0, layout.ranks - 1] if two else [])
    for span in added:
        passes = [s for s in spans if (s.rank, s.lane) == (span.rank, "compute")]
        assert span.start >= max(own.end for own in passes)


def test_timeline_is_the_same_on_every_rank_and_survives_a_file(
    observed: list[Observed], tmp_path: Path
) -> None:
    timeline = observed[0].timeline
    assert all(own.timeline == timeline for own in observed)
    save_timeline(timeline, tmp_path / "new" / "timeline.json")
    loaded = load_timeline(tmp_path / "new" / "timeline.json")
    assert loaded.ranks == timeline.ranks
    assert Counter(loaded.spans) == Counter(timeline.spans)


@pytest.mark.parametrize("vocabulary", ["none", "vocab-1", "vocab-2"])
def test_bf16_trains_close_to_fp32(vocabulary: str, ranks: RankPool) -> None:
    layout = Layout(2, vocabulary)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        config = JOB.config(layout, dtype)
        results = ranks.run(run_recorded, 2, config=config, batches=JOB.batches())
        losses.append(results[-1].loss_parts[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def gradients_of_plans(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches
) -> list[torch.Tensor]:
    """Gradients of the same batch under a plan, under another, and under the first put back."""
    state = build_train_state(config, make_pipeline_groups())
    pipeline, found = state.pipeline, []
    other = make_plan("1f1b", config.parallel.vocab_parallel, world_size, JOB.microbatches)
    assert other.split_backward != state.plan.split_backward

    def note() -> None:
        pipeline.train(to_device(batches[0], CPU), 0)
        found.append(torch.cat([bucket.gradients for bucket in state.buckets]))
        state.zero_gradients()

    note()
    replaced = pipeline.replace_plan(other, UNIT_COSTS)
    note()
    pipeline.put_back(replaced)
    note()
    pipeline.close()
    return found


@pytest.mark.parametrize("vocabulary", ["none", "vocab-2"])
def test_a_plan_that_is_put_back_computes_what_it_did(vocabulary: str, ranks: RankPool) -> None:
    config = JOB.config(Layout(2, vocabulary, "zb-h1"))
    for first, other, back in ranks.run(
        gradients_of_plans, 2, config=config, batches=JOB.batches()
    ):
        assert torch.equal(first, back)
        torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-6)
        assert first.any()
