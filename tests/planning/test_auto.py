"""``auto``: the fastest schedule within the memory limit, planned without planning all of them."""

import pytest
from planning.test_run_plan import config
from schedules.cases import V_SHAPED

from megatron.model.distribution import LayerDistribution
from megatron.planning.candidate import Candidate
from megatron.planning.known import NEAR
from megatron.planning.race import chosen
from megatron.planning.run_plan import candidates, make_run_plan
from megatron.schedules.catalogue import SCHEDULES, compared_schedules
from megatron.schedules.held import in_flight


def ranking(compared: list[Candidate]) -> list[Candidate]:
    """All of them planned: those that fit first, the fastest first."""
    return sorted(compared, key=lambda candidate: (not candidate.fits, candidate.time))


def test_auto_takes_the_fastest() -> None:
    auto = config("auto", "vocab-2", 3, layers=6)
    ranked = ranking(candidates(auto))
    taken = chosen(candidates(auto))
    assert make_run_plan(auto) == taken.run_plan
    assert make_run_plan(auto, seconds=0.0) == taken.run_plan, "only GPUs are compared for a time"
    assert taken.time * (1 - NEAR) <= min(c.time for c in ranked)
    assert {c.schedule for c in ranked} == set(SCHEDULES)
    assert len({c.time for c in ranked}) > 3
    assert all(c.least_time <= c.time * (1 + 1e-9) for c in ranked)


def test_auto_does_not_plan_what_cannot_be_faster() -> None:
    compared = candidates(config("auto", "vocab-2", 2, microbatches=16))
    taken = chosen(compared)
    planned = {c.schedule for c in compared if "run_plan" in vars(c)}
    assert taken.schedule in planned
    assert "gpipe" not in planned
    assert len(planned) < len(compared) / 2


def test_auto_keeps_to_the_memory_limit() -> None:
    limit = 3.0
    auto = config("auto", "none", 4, microbatches=8, zero_bubble_max_pending_backward=limit)
    found = make_run_plan(auto)
    assert max(in_flight(found.plan)) <= limit
    ranked = ranking(candidates(auto))
    fitting = [c for c in ranked if c.fits]
    assert ranked[: len(fitting)] == fitting
    assert all(c.in_flight > limit for c in ranked[len(fitting) :])
    assert min(c.time for c in ranked) < fitting[0].time, "the limit costs time"
    assert "zb-auto" in {c.schedule for c in fitting}


def test_a_limit_below_every_schedule_is_refused_with_the_least() -> None:
    """With one stage a rank zb-auto fits any limit: so here there are two."""
    folded = LayerDistribution("explicit", counts=(2, 2, 2, 2))
    with pytest.raises(ValueError, match=r"max-pending-backward 1 is too few .* least is .* with"):
        make_run_plan(
            config("auto", "vocab-1", distribution=folded, zero_bubble_max_pending_backward=1.0)
        )


def test_auto_leaves_out_what_leaves_ranks_without_parameters() -> None:
    """Two layers on the first two stages: at the point of a V of three ranks there is none."""
    first_two = LayerDistribution("remainder")
    folded = {*V_SHAPED}
    for treatment, left_out in (("none", folded), ("vocab-2", set())):
        auto = config("auto", treatment, ranks=3, layers=2, distribution=first_two)
        assert {c.schedule for c in candidates(auto)} == set(SCHEDULES) - left_out


def test_auto_leaves_out_what_the_layers_do_not_fit() -> None:
    names = {c.schedule for c in candidates(config("auto", ranks=2, layers=2))}
    assert names == {name for name, known in SCHEDULES.items() if known.chunks == 1}
    with pytest.raises(ValueError, match=r"^--pipeline-schedule auto: no sch.*; .*--num-layers 3"):
        make_run_plan(config("auto", ranks=2, layers=3))


def test_training_compares_the_schedules_that_the_simulator_compares() -> None:
    for limit in (None, 3.0):
        names = [
            c.schedule for c in candidates(config("auto", zero_bubble_max_pending_backward=limit))
        ]
        assert names == [*compared_schedules(limit)]
