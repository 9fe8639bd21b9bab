"""Activations on the host of a pretended GPU: order of the copies, memory, and a quick host."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from correctness.short_runs import Layout
from cuda_path import needs_pretended_gpus
from harness.marks import full
from pretended_gpu.paper_memory import memory, moving, paper_config
from pretended_gpu.pool import GpuPool
from pretended_gpu.rank import Findings, run_rank

from megatron.layers.recompute import Recomputation
from megatron.planning.forecast_run import forecast_run
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.offload import HostCopies
from megatron.simulator.costs.accuracy import ALLOCATED_WITHIN
from megatron.simulator.costs.gpus import GIB, gpu

pytestmark = needs_pretended_gpus


@pytest.mark.parametrize(
    ("layout", "recomputation", "layers"),
    [
        (Layout(1, "none", "gpipe", slices=2), None, 1),
        full(Layout(1, "none", "gpipe"), None, 1),
        full(Layout(2, "vocab-2", "interleaved"), None, 4),
        full(Layout(2, "vocab-1", "zb-v", slices=4), None, 4),
        full(Layout(2, "vocab-2", "interleaved"), Recomputation(group=1), 4),
    ],
    ids=str,
)
def test_streams_are_ordered_and_memory_is_what_a_dry_run_says(
    layout: Layout, recomputation: Recomputation | None, layers: int, gpus: GpuPool
) -> None:
    """No host waits for a copy either: that would be a fault too.

    If layers are computed again, there is little to move. So the memory that copies free is held
    against the activations in flight, not against all memory. Of these, five may stay: of the pass
    that runs, under way to the host, under way back, back one pass before they are read, and as
    much as the pass itself takes.
    """
    config = paper_config(layout, 4096, layers=layers)
    train = replace(config.train, global_batch_size=layout.ranks + 5)
    if recomputation is not None:
        train = replace(train, recomputation=recomputation)
    config = replace(config, train=train)
    copied = moving(config, 2)
    own = memory(copied, gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)
    assert own.pinned == pytest.approx(own.pinned_predicted, rel=0.01)
    kept = moving(config, None)
    peak = forecast_run(kept, make_run_plan(kept), gpu("A100")).outcome.peak
    activations = in_flight(copied)
    freed = peak[0] / GIB - own.allocated[0]
    assert freed > (1 - 5 / len(activations)) * sum(activations) > 0


def in_flight(config: RunConfig) -> list[float]:
    """Return GiB of the activations between F and B on rank 0, a number for every chunk and unit.

    They are those of the moment at which there are most.
    """
    run_plan = make_run_plan(config)
    plan, most = run_plan.plan, list[float]()
    count = forecast_run(config, run_plan, gpu("A100")).memories[0].count
    now: dict[tuple[int, int], float] = {}
    for item in plan.rows[0]:
        key = plan.unit(item), item.chunk
        if item.kind == "F":
            of_slice, n = count.of_slice(item.slice, plan.slices)
            now[key] = of_slice.moved[item.chunk] / n / GIB
            most = max(most, list(now.values()), key=sum)
        elif item.kind == "B":
            del now[key]
    return most


def small() -> RunConfig:
    config = paper_config(Layout(1, "none", "gpipe"), 512, layers=1, sequence=64)
    return moving(replace(config, train=replace(config.train, global_batch_size=6)), 1)


def a_memory_that_is_free_before_its_copy() -> AbstractContextManager[Any]:
    finish = HostCopies.finish

    def hurry(self: HostCopies, comm: Any, pending: Any) -> None:
        if comm.kind != "O":
            finish(self, comm, pending)
            return
        for kept in self._moved[self._key(comm)].kept:
            kept.elements = None

    return patch.object(HostCopies, "finish", hurry)


def a_copy_that_is_read_before_it_is_done() -> AbstractContextManager[Any]:
    finish = HostCopies.finish

    def hurry(self: HostCopies, comm: Any, pending: Any) -> None:
        if comm.kind == "O":
            finish(self, comm, pending)
            return
        moved = self._moved.pop(self._key(comm))
        for kept, elements in zip(moved.kept, pending._value, strict=True):
            kept.elements = elements

    return patch.object(HostCopies, "finish", hurry)


FAULTS = {
    a_memory_that_is_free_before_its_copy: "memory of passes is free",
    a_copy_that_is_read_before_it_is_done: "which it does not wait for",
}


def run_with(fault: Any, config: RunConfig, rank: int) -> Findings:
    with fault():
        return run_rank(config, rank, iterations=1, valid=False)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_is_broken_is_found(fault: Any, gpus: GpuPool) -> None:
    [found] = gpus.map(run_with, fault, small(), ranks=1)
    assert any(FAULTS[fault] in what for what in found.faults), found.faults
