"""Ranks with different memory take one plan, made for the smallest memory of all."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
import torch.distributed as dist
from planning.test_memory_limit import A100, SMALL, limited, limited_in_gib

from megatron.planning.limit_of_rank import memory_limit_of, memory_of
from megatron.planning.run_memory import held_by_ranks
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.training.agreement import run_digests
from megatron.training.prepare import Prepared, _for_all_memories, _planned, agreed
from megatron.training.rendezvous import Rendezvous, UserError

NO_DATA = cast("Any", None)


def meet(runs: list[RunConfig]) -> list[Prepared]:
    """What the ranks have prepared when they have met; each has planned for its own memory."""
    store = dist.HashStore()
    plans = [_planned(run, number) for number, run in enumerate(runs)]

    def rank(number: int) -> Prepared:
        run, plan = runs[number], plans[number]
        digests = run_digests(run, plan)
        mine = Prepared(run, run, run.parallel.grid, plan, NO_DATA, digests)
        return agreed(mine, Rendezvous(store, number, len(runs)), number)

    with ThreadPoolExecutor(len(runs)) as ranks:
        return list(ranks.map(rank, range(len(runs))))


def on_cpus(run: RunConfig, memory: float) -> RunConfig:
    """The run on a rank that knows its memory, and no GPU."""
    own = replace(memory_of(run), bytes=memory, usable=memory, named="a machine")
    return replace(run, parallel=replace(run.parallel, gpu=None, memory=own))


@pytest.mark.parametrize("smallest", [0, 1, 2])
@pytest.mark.parametrize("knows_gpu", [True, False])
def test_the_plan_is_made_for_the_rank_with_the_least_memory(
    smallest: int, knows_gpu: bool
) -> None:
    memories = [3 * SMALL, 2.5 * SMALL, 2 * SMALL]
    memories[smallest] = SMALL
    runs = [limited(12, ranks=3, layers=9, memory=memory) for memory in memories]
    if not knows_gpu:
        runs = [on_cpus(run, memory) for run, memory in zip(runs, memories, strict=True)]
    found = meet(runs)
    alone = make_run_plan(runs[smallest])
    assert make_run_plan(runs[smallest - 1]).plan != alone.plan, "more memory leaves another plan"
    for own in found:
        assert own.run_plan.plan == alone.plan
        assert own.run_plan.limits == alone.limits
        assert memory_of(own.config).bytes == SMALL
        assert max(held_by_ranks(own.config, own.run_plan)[0]) <= 0.12 * SMALL
    assert len({limit.in_words() for own in found if (limit := memory_limit_of(own.config))}) == 1
    told = "" if smallest == 0 else f" (rank {smallest} has the least)"
    named = "a machine" if not knows_gpu else "A100"
    notes = [note for note in found[0].config.notes if "the limit of a rank is" in note]
    assert len(notes) == 1
    assert f"of the 2.0 GiB of {named}{told}, which allows" in notes[0]


def test_gib_are_the_same_on_every_rank_that_has_so_many() -> None:
    runs = [limited_in_gib(0.31, ranks=2, memory=memory) for memory in (2 * SMALL, SMALL)]
    found = meet(runs)
    plans = {own.run_plan.plan.to_text() for own in found}
    assert plans == {make_run_plan(own).plan.to_text() for own in runs}
    assert len(plans) == 1


def test_rank_0_tells_whose_memory_has_no_room() -> None:
    runs = [limited(15, ranks=2), limited(15, ranks=2, memory=0.1 * SMALL)]
    own = [Prepared(run, run, run.parallel.grid, cast("Any", None), NO_DATA, {}) for run in runs]
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        first, second = (
            ranks.submit(_for_all_memories, own[number], Rendezvous(store, number, 2))
            for number in (0, 1)
        )
        with pytest.raises(
            UserError, match=r"204\.8 MiB of A100 \(rank 1 has the least\), and rank"
        ):
            first.result()
        assert memory_of(second.result().asked).bytes == 0.1 * SMALL


def test_ranks_without_a_limit_by_memory_tell_each_other_nothing() -> None:
    run = limited(15, ranks=2)
    planning = replace(
        run.parallel.planning,
        zero_bubble_adaptive_memory_limit_percentile=None,
        zero_bubble_max_pending_backward=3.0,
    )
    free = replace(run, parallel=replace(run.parallel, planning=planning))
    assert all(own.config.parallel.memory is None for own in meet([free, free]))
    assert free.on(A100).parallel.memory is None
