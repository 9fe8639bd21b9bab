"""The costs of pairs know all places at which passes can switch: a plan's turns count them."""

from dataclasses import replace
from pathlib import Path

import pytest
from correctness.joined_jobs import config_of, file_of, in_pairs, places_of_pairs
from correctness.short_runs import Layout
from correctness.test_expert_ranks import MODELS, job_of
from correctness.test_pairs_of_layers import job_of as job_of_layers
from harness.rank_pool import RankPool

from megatron.parallel.settings import Dispatcher
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.schedules.pair_steps import Switches
from megatron.schedules.passes import PAUSING, PassKind


def check(config: RunConfig, found: list[list[tuple[tuple[PassKind, int], ...]]]) -> None:
    """Compare the places of real pairs with the count.

    A last switch, behind which a pass has nothing to do, is not counted.
    """
    turns = make_run_plan(config).costs.turns
    assert found[0]
    assert all(own == found[0] for own in found)
    for pair in found[0]:
        pauses = all(kind in PAUSING for kind, _ in pair)
        for kind, places in pair:
            if kind in PAUSING:
                known = turns[kind][0][0]().places
                counted = sum(pauses or isinstance(place, Switches) for place in known)
                assert places in ((counted,) if kind == "F" else (counted, counted + 1)), pair


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("model", ["qwen2", "deepseek"])
def test_places_of_exchanges_are_counted(
    model: str, dispatcher: Dispatcher, ranks: RankPool, tmp_path: Path
) -> None:
    """An axis of one rank, such as that of ranks that share an expert, is no place to switch."""
    job = job_of(MODELS[model])
    layout = Layout(1, "none", "1f1b", replicas=2, experts=2, dispatcher=dispatcher)
    file = file_of(layout, job.microbatches // 2, tmp_path)
    config = config_of(job, replace(layout, schedule="file", file=file), overlap=True)
    check(config, ranks.run(places_of_pairs, 2, config=config, batches=job.batches()))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, "none", "1f1b", tensor=2, sequence=True),
        Layout(1, "none", "zb-h1", tensor=2, sequence=True),
        Layout(1, "none", "1f1b", context=2, exchange="a2a"),
    ],
    ids=str,
)
def test_places_of_layers_are_counted(layout: Layout, ranks: RankPool, tmp_path: Path) -> None:
    job = job_of_layers()
    config = in_pairs(job, layout, tmp_path, joined=True)
    check(config, ranks.run(places_of_pairs, 2, config=config, batches=job.batches()))
