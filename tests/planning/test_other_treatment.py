"""The job with the other treatment of the vocabulary, predicted from measured passes."""

from dataclasses import replace
from typing import Any

import pytest
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.planning import other_treatment
from megatron.planning.other_treatment import Prediction, predict_other
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.simulator.simulate import Timeline, simulate

M = 6
JOB = Job(GPTOptions(num_layers=4, vocab_size=64), microbatches=M)


def predicted(config: RunConfig, costs: Costs) -> Prediction:
    run_plan = make_run_plan(config)
    return predict_other(config, run_plan, run_plan.plan, costs)


def simulated(layout: Layout, costs: Costs) -> Timeline:
    """The job's own plan with costs by hand."""
    run_plan = make_run_plan(JOB.config(layout))
    return simulate(lower(run_plan.plan, run_plan.costs), costs)


def test_the_whole_vocabulary_on_the_last_of_two_ranks() -> None:
    """1F1B of two ranks whose second one is slower takes F + m (F' + B') + B, worked by hand."""
    layout = Layout(2, "vocab-2")
    costs = Costs(
        {
            "F": [[1.0], [1.0]],
            "B": [[2.0], [2.0]],
            "S": [1.6, 1.4],
            "T": [0.8, 0.7],
            "IF": [0.25, 0.25],
            "IB": [0.5, 0.5],
        },
        {"C0": 0.1, "C1": 0.2},
    )
    found = predicted(JOB.config(layout), costs)
    output = 1.6 + 1.4 + 0.8 + 0.7
    first, last = 1.25 + 2.5, 3 + output
    assert found.treatment == "none"
    assert found.output_layer == pytest.approx(output)
    assert found.other == pytest.approx(first + M * last)
    assert found.idle == pytest.approx(1 - M * (first + last) / (2 * found.other))
    assert found.own == pytest.approx(simulated(layout, costs).end)
    assert found.iteration(found.own + 0.3) == pytest.approx(found.other + 0.3)
    assert not found.at_best


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_vocabulary_split_over_four_ranks(schedule: str) -> None:
    """The last stage's extra 8 are S of 8/4 x 2/3 and T of 8/4 x 1/3 on every rank."""
    layout = Layout(4, "none", schedule)
    whole: Any = {"F": [[1.0]] * 3 + [[3.0]], "B": [[2.0]] * 3 + [[8.0]]}
    even: Any = {"F": 1.0, "B": 2.0}
    if schedule == "zb-h1":
        whole = {"F": [[1.0]] * 3 + [[3.0]], "B": [[1.0]] * 3 + [[4.0]], "W": whole["F"]}
        whole["W"] = [[1.0]] * 3 + [[4.0]]
        even = {"F": 1.0, "B": 1.0, "W": 1.0}
    found = predicted(JOB.config(layout), Costs(whole))
    split = {**even, "S": 4 / 3, "T": 2 / 3, "IF": 0.0, "IB": 0.0}
    other = simulated(replace(layout, vocabulary="vocab-2"), Costs(split))
    assert found.treatment == "vocab-2"
    assert found.output_layer == pytest.approx(8)
    assert found.other == pytest.approx(other.end)
    assert found.idle == pytest.approx(other.idle())
    assert found.at_best


def test_layers_that_made_room_for_the_vocabulary_are_spread_evenly() -> None:
    """The last of two stages got one of four layers, as in redis; a layer takes 1 + 2."""
    config = JOB.config(Layout(2, "redis"))
    run_plan = replace(make_run_plan(config), layers=(3, 1))
    costs = Costs({"F": [[3.0], [2.0]], "B": [[6.0], [4.0]]})
    found = predict_other(config, run_plan, run_plan.plan, costs)
    split: Any = {"F": 2.0, "B": 4.0, "S": 1.0, "T": 0.5, "IF": 0.0, "IB": 0.0}
    assert found.output_layer == pytest.approx(3)
    assert found.other == pytest.approx(simulated(Layout(2, "vocab-2"), Costs(split)).end)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(1, "none"), "one pipeline rank"),
        (Layout(2, "vocab-2", slices=2), "passes of slices"),
        (Layout(2, "vocab-2", offloaded=1), "copies to the host"),
    ],
)
def test_a_job_that_cannot_be_predicted_says_why(layout: Layout, reason: str) -> None:
    config = JOB.config(layout)
    with pytest.raises(ValueError, match=reason):
        predicted(config, Costs({"F": 1.0, "B": 2.0}))


def test_batches_that_still_grow_are_not_compared_with_full_ones() -> None:
    layout = Layout(2, "vocab-2")
    small = make_run_plan(replace(JOB, microbatches=2).config(layout))
    with pytest.raises(ValueError, match="have not grown to their full size"):
        predict_other(JOB.config(layout), small, small.plan, Costs({"F": 1.0, "B": 2.0}))


def test_a_plan_of_very_many_passes_is_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_treatment, "MOST_PASSES", 2 * 2 * M - 1)
    with pytest.raises(ValueError, match=f"a plan of {2 * 2 * M} passes takes long to make"):
        predicted(JOB.config(Layout(2, "none")), Costs({"F": 1.0, "B": 2.0}))
