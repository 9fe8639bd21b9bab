"""Where searches may end differently, all ranks take the plan of rank 0."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness.precisions import precision
from planning.test_dry_run import config as config_on_gpus
from planning.test_dry_run import few, on
from planning.test_run_plan import config

from megatron.planning.planned_run import RunPlan
from megatron.planning.race import chosen
from megatron.planning.run_plan import (
    COMPARISON_SECONDS,
    candidates,
    make_run_plan,
    only_rank_0_plans,
)
from megatron.schedules.search.watch import Watch
from megatron.schedules.settings import PlanSettings
from megatron.training import prepare
from megatron.training.agreement import run_digests
from megatron.training.prepare import shared_plan
from megatron.training.rendezvous import Rendezvous


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved", "auto"])
@pytest.mark.parametrize("treatment", ["vocab-2", "redis"])
def test_a_plan_comes_back_from_the_store(schedule: str, treatment: str) -> None:
    if schedule == "auto" and treatment == "redis":
        treatment = "none"
    run = config(schedule, treatment, 2)
    found = make_run_plan(run)
    again = shared_plan(Rendezvous(dist.HashStore(), 0, 1), found)
    assert (again.plan, again.layers) == (found.plan, found.layers)
    assert run_digests(run, again) == run_digests(run, found)


def test_a_program_that_a_rank_has_derived_is_not_sent() -> None:
    run = config("1f1b", "vocab-2", 2)
    found = make_run_plan(run)
    program = found.program
    sent = pickle.loads(pickle.dumps(found))
    assert "program" not in vars(sent)
    assert sent.program.rows == program.rows


def test_all_ranks_take_the_plan_of_rank_0() -> None:
    run = config("auto", "vocab-2", 2, microbatches=8)
    own = [make_run_plan(config(name, "vocab-2", 2, microbatches=8)) for name in ("zb-v", "1f1b")]
    store = dist.HashStore()

    def rank(number: int) -> RunPlan:
        return shared_plan(Rendezvous(store, number, 2), own[number])

    with ThreadPoolExecutor(2) as ranks:
        shared = list(ranks.map(rank, (0, 1)))
    assert shared[0] == shared[1]
    assert shared[0].plan == own[0].plan != own[1].plan
    assert run_digests(run, shared[0]) == run_digests(run, shared[1])


def test_the_plan_only_rank_0_plans_where_it_is_searched_for_so_long() -> None:
    """Then the ranks share it; elsewhere each of them finds the same."""
    compared = on(config_on_gpus(2, "none", "auto"), "H100")
    assert only_rank_0_plans(compared)
    named = on(config_on_gpus(2, "none", "1f1b"), "H100")
    assert not only_rank_0_plans(named)
    assert not only_rank_0_plans(config_on_gpus(2, "none", "auto")), "compared by FLOPs"
    narrow = replace(compared, train=replace(compared.train, precision=precision(torch.float32)))
    assert not only_rank_0_plans(narrow), "compared by FLOPs too"
    limited = PlanSettings(search_seconds=3.0)
    assert only_rank_0_plans(replace(named, parallel=replace(named.parallel, planning=limited)))


def test_only_rank_0_searches_where_the_plan_only_rank_0_plans() -> None:
    compared = on(config_on_gpus(2, "none", "auto"), "H100")
    named = on(config_on_gpus(2, "none", "1f1b"), "H100")
    for run, limits in ((compared, [None, 0.0]), (named, [None, None])):
        with patch.object(prepare, "make_run_plan") as made:
            for rank in (0, 1):
                prepare._planned(run, rank)
        assert [call.kwargs["watch"].seconds for call in made.call_args_list] == limits
        assert all(call.kwargs["seconds"] == COMPARISON_SECONDS for call in made.call_args_list)


def test_ranks_that_compare_on_a_gpu_agree_on_the_plan_of_rank_0() -> None:
    run = on(few(config_on_gpus(2, "none", "auto")), "H100")
    own = [make_run_plan(on(few(config_on_gpus(2, "none", n)), "H100")) for n in ("zb-v", "1f1b")]
    store = dist.HashStore()

    def rank(number: int) -> prepare.Prepared:
        digests = run_digests(run, own[number])
        grid, data = run.parallel.grid, cast("Any", None)
        mine = prepare.Prepared(run, run, grid, own[number], data, digests)
        return prepare.agreed(mine, Rendezvous(store, number, 2), number)

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(rank, (0, 1))
    assert first.run_plan == second.run_plan
    assert second.run_plan.plan == own[0].plan
    assert second.run_plan.schedule == "zb-v"


def test_without_time_few_are_planned_and_the_one_that_is_taken_fits() -> None:
    compared = candidates(config("auto", "vocab-2", 2, microbatches=8), watch=Watch(0.0))
    taken = chosen(compared)
    assert 1 <= sum(candidate.is_planned for candidate in compared) < len(compared)
    assert taken.is_planned
    assert taken.fits
