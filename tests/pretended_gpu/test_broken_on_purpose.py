"""What the pretended GPUs are there to find, they find: the CUDA code, broken in every such way."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
import torch
from correctness.short_runs import Job, Layout
from cuda_path import needs_pretended_gpus
from harness.marks import full
from pretended_gpu.deadlock import stuck
from pretended_gpu.gpu import DEVICE, PretendedGpu
from pretended_gpu.order import Issued
from pretended_gpu.pool import GpuPool
from pretended_gpu.rank import Findings, run_rank
from pretended_gpu.sound import assert_communications_fit, assert_sound
from reference.plain_gpt import GPTOptions
from torch import nn

from megatron.data.microbatch import Microbatch
from megatron.layers.vocabulary.output_s import ShardState
from megatron.parallel import lanes
from megatron.parallel.experts import ExchangingExperts, GatheringExperts, Journey
from megatron.parallel.settings import Dispatcher
from megatron.run.run_config import RunConfig
from megatron.runtime import pipeline
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.feed import Feed, Staged
from megatron.runtime.stage_passes import StagePasses
from megatron.schedules.costs import Costs
from megatron.schedules.lower import Program, Start, lower
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan

pytestmark = needs_pretended_gpus

Fault: TypeAlias = Callable[[], AbstractContextManager[Any]]


def a_lane_that_does_not_wait_for_its_caller() -> AbstractContextManager[Any]:
    def submit(self: lanes.StreamLane, work: Callable[[], Any]) -> Any:
        with torch.cuda.stream(self._stream), torch.no_grad():
            value = work()
        return lanes._StreamResult(work, value, self._stream.record_event())

    return patch.object(lanes.StreamLane, "submit", submit)


def a_result_that_nobody_waits_for() -> AbstractContextManager[Any]:
    return patch.object(lanes._StreamResult, "wait", lambda self: self._value)


def a_lane_that_waits_only_once() -> AbstractContextManager[Any]:
    """What it allocates later may be what passes still use."""
    submit = lanes.StreamLane.submit
    waited: set[int] = set()

    def submit_without_waiting(self: lanes.StreamLane, work: Callable[[], Any]) -> Any:
        if id(self) not in waited:
            waited.add(id(self))
            return submit(self, work)
        with torch.cuda.stream(self._stream), torch.no_grad():
            value = work()
        return lanes._StreamResult(work, value, self._stream.record_event())

    return patch.object(lanes.StreamLane, "submit", submit_without_waiting)


def a_gradient_that_is_dropped_unrecorded() -> AbstractContextManager[Any]:
    def drop(self: ShardState) -> None:
        self.raw_gradient_nh = None

    return patch.object(ShardState, "drop_gradient", drop)


def _after_forward(act: Callable[[Any], object]) -> AbstractContextManager[Any]:
    forward = StagePasses.forward

    def and_more(self: StagePasses, item: Pass) -> None:
        forward(self, item)
        act(self.model)

    return patch.object(StagePasses, "forward", and_more)


def a_pass_that_looks_at_a_number() -> AbstractContextManager[Any]:
    return _after_forward(lambda model: float(next(model.parameters()).detach().sum()))


def a_pass_that_sends_a_number() -> AbstractContextManager[Any]:
    return _after_forward(lambda model: torch.tensor([1.0]).to(next(model.parameters()).device))


def a_pass_that_takes_indices_from_the_host() -> AbstractContextManager[Any]:
    return _after_forward(lambda model: next(model.parameters()).detach()[torch.tensor([0])])


def a_pass_that_asks_a_mask_how_many() -> AbstractContextManager[Any]:
    def overwrite(model: nn.Module) -> None:
        copy = next(model.parameters()).detach().clone()
        copy[copy > 0] = copy.flatten()

    return _after_forward(overwrite)


def a_batch_in_pageable_memory() -> AbstractContextManager[Any]:
    def memory(size: int, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    return patch("megatron.runtime.batch._memory", memory)


def a_batch_that_waits_for_nobody() -> AbstractContextManager[Any]:
    """It overwrites the one that the iteration before may still read."""

    def take(self: Feed, staged: Staged, **named: Any) -> Any:
        batch = whole(self, staged, **named)
        self._taken = None
        return batch

    whole = Feed.take
    return patch.object(Feed, "take", take)


def a_batch_that_nobody_waits_for() -> AbstractContextManager[Any]:
    def stage(self: Feed, microbatches: Any) -> Staged:
        staged = whole(self, microbatches)
        return replace(staged, copied=torch.cuda.current_stream().record_event())

    whole = Feed.stage
    return patch.object(Feed, "stage", stage)


def a_batch_that_is_not_kept() -> AbstractContextManager[Any]:
    make = Feed.__init__
    return patch.object(Feed, "__init__", lambda self, device, kept: make(self, device, kept - 1))


def a_pass_that_synchronizes() -> AbstractContextManager[Any]:
    return _after_forward(lambda model: torch.cuda.synchronize())


def a_pass_that_keeps_something() -> AbstractContextManager[Any]:
    kept: list[torch.Tensor] = []
    return _after_forward(lambda model: kept.append(next(model.parameters()).clone()))


FAULTS = {
    a_lane_that_does_not_wait_for_its_caller: "which it does not wait for",
    a_result_that_nobody_waits_for: "which it does not wait for",
    a_lane_that_waits_only_once: "memory of stream 1 is free",
    a_gradient_that_is_dropped_unrecorded: "memory of passes is free",
    a_pass_that_looks_at_a_number: "the host waits: for a number",
    a_pass_that_sends_a_number: "the host waits: aten._to_copy.default between host and device",
    a_pass_that_takes_indices_from_the_host: "aten.index.Tensor between host and device",
    a_pass_that_asks_a_mask_how_many: "aten.index_put_.default with a mask",
    a_batch_in_pageable_memory: "the host waits: aten._to_copy.default between host and device",
    a_pass_that_synchronizes: "the host waits: torch.cuda.synchronize",
}


def read_ahead(fault: Fault, rank: int) -> list[str]:
    """Read batches for which nobody ever waits on the host; return the faults."""
    used: list[torch.Tensor] = []
    with fault(), PretendedGpu() as gpu, gpu.without_waiting():
        tokens, feed = torch.zeros((2, 8), dtype=torch.int64), Feed(DEVICE, 2)
        batch = [Microbatch(tokens, tokens, torch.ones((2, 8)))] * 3
        staged, before = feed.stage(batch), list[DeviceMicrobatch]()
        for _ in range(5):
            taken = feed.take(staged, replicas=1)
            staged = feed.stage(batch)
            used += [each.tokens_n + each.targets_n for each in (*before, *taken)]
            before = taken
    return gpu.faults


@pytest.mark.parametrize(
    "fault",
    [
        nullcontext,
        a_batch_that_waits_for_nobody,
        a_batch_that_nobody_waits_for,
        a_batch_that_is_not_kept,
    ],
)
def test_what_breaks_reading_ahead_is_found(fault: Fault, gpus: GpuPool) -> None:
    [found] = gpus.map(read_ahead, fault, ranks=1)
    assert bool(found) == (fault is not nullcontext)
    assert all("which it does not wait for" in each for each in found)


def entered(rank: int) -> list[str]:
    """Stage a batch; return the GPUs and streams that are made current, in order."""
    order: list[str] = []
    with PretendedGpu():
        feed, use = Feed(DEVICE), torch.cuda.stream
        tokens = torch.zeros((2, 8), dtype=torch.int64)

        def stream(own: Any) -> Any:
            order.append("stream")
            return use(own)

        with (
            patch.object(torch.cuda, "set_device", lambda device: order.append(str(device))),
            patch.object(torch.cuda, "stream", stream),
        ):
            feed.stage([Microbatch(tokens, tokens, torch.ones((2, 8)))])
    return order


def test_who_stages_a_batch_is_on_its_gpu_before_and_after(gpus: GpuPool) -> None:
    """A new thread is on GPU 0, and would return there: that makes a context on it."""
    assert gpus.map(entered, ranks=1) == [["cuda:0", "stream"]]


def run_with(fault: Fault, config: RunConfig, rank: int) -> Findings:
    with fault():
        return run_rank(config, rank)


@pytest.mark.parametrize(
    "fault",
    [fault if number % 6 == 0 else full(fault) for number, fault in enumerate(FAULTS)],
    ids=lambda fault: fault.__name__,
)
def test_what_is_broken_is_found(fault: Fault, gpus: GpuPool) -> None:
    config = Job(GPTOptions(num_layers=2), microbatches=3).config(Layout(2, "vocab-2"))
    for own in gpus.map(run_with, fault, config, ranks=2):
        assert any(FAULTS[fault] in what for what in own.faults), own.faults


def a_further_number() -> AbstractContextManager[Any]:
    """Ask the device beside the numbers of rows whether any row travels."""
    stack = ExitStack()
    for kind, name in ((ExchangingExperts, "journey"), (GatheringExperts, "own_slots")):
        whole = getattr(kind, name)

        def asking(self: Any, rows: torch.Tensor, *more: Any, whole: Any = whole) -> Any:
            assert rows.sum() > 0
            return whole(self, rows, *more)

        stack.enter_context(patch.object(kind, name, asking))
    return stack


def numbers_that_are_read_twice() -> AbstractContextManager[Any]:
    journey, own_slots = ExchangingExperts.journey, GatheringExperts.own_slots

    def two_journeys(self: ExchangingExperts, *given: Any) -> Journey:
        journey(self, *given)
        return journey(self, *given)

    def two_ends(self: GatheringExperts, *given: Any) -> int:
        own_slots(self, *given)
        return own_slots(self, *given)

    stack = ExitStack()
    stack.enter_context(patch.object(ExchangingExperts, "journey", two_journeys))
    stack.enter_context(patch.object(GatheringExperts, "own_slots", two_ends))
    return stack


@pytest.mark.parametrize("dispatcher", ["alltoall", full("allgather")])
def test_a_wait_of_the_host_beside_the_one_for_numbers_of_rows_is_found(
    dispatcher: Dispatcher, gpus: GpuPool
) -> None:
    options = GPTOptions(
        num_layers=1, swiglu=True, add_bias_linear=False, num_experts=4, moe_ffn_hidden_size=16
    )
    layout = Layout(1, "none", replicas=2, experts=2, dispatcher=dispatcher)
    config = Job(options, microbatches=4).config(layout, torch.bfloat16)
    waits = config.train.num_microbatches
    faults: dict[Fault, tuple[list[str], int]] = {
        nullcontext: ([], waits),
        a_further_number: (["the host waits: for a number (item, tolist, float, if)"], waits),
        numbers_that_are_read_twice: ([], 2 * waits),
    }
    for fault, wanted in faults.items():
        [found] = gpus.map(run_with, fault, config, ranks=1)
        assert (found.faults, found.waits[-1]) == wanted


def test_what_grows_is_found(gpus: GpuPool) -> None:
    config = Job(GPTOptions(num_layers=2), microbatches=3).config(Layout(2, "vocab-2"))
    found = gpus.map(run_with, a_pass_that_keeps_something, config, ranks=2)
    assert all(a < b for own in found for a, b in pairwise(own.held))
    with pytest.raises(AssertionError):
        assert_sound(found)


def other_order_on_one_rank(rank: int) -> AbstractContextManager[Any]:
    """Exchange the broadcast of X with the reduction that is started next, of the embeddings."""

    def lower_and_exchange(plan: Plan, costs: Costs) -> Program:
        program = lower(plan, costs)
        if rank != 0 or plan.microbatches == 1:  # as in a warm-up: it has no such two
            return program
        row = list(program.rows[0])
        found = [(n, s.comm.kind) for n, s in enumerate(row) if isinstance(s, Start)]
        comms = [n for n, kind in found if kind[0] == "C"]
        kinds = [kind for _, kind in found if kind[0] == "C"]
        n = next(n for n in range(len(comms)) if kinds[n : n + 2] == ["CIF", "C0"])
        one, other = comms[n : n + 2]
        row[one], row[other] = row[other], row[one]
        return replace(program, rows=(tuple(row), program.rows[1]))

    return patch.object(pipeline, "lower", lower_and_exchange)


def run_in_other_order(config: RunConfig, rank: int) -> Findings:
    with other_order_on_one_rank(rank):
        return run_rank(config, rank)


@pytest.mark.full
def test_another_order_is_found(gpus: GpuPool) -> None:
    config = Job(GPTOptions(num_layers=2), microbatches=5).config(Layout(2, "vocab-2"))
    found = gpus.map(run_in_other_order, config, ranks=2)
    with pytest.raises(AssertionError, match="vocabulary"):
        assert_communications_fit([own.issued for own in found])
    assert stuck([own.journal for own in found]) != []


def test_ranks_that_do_not_fit_are_found() -> None:
    def issued(kind: str, peer: int) -> Issued:
        group = "vocabulary" if kind == "reduce" else "forward"
        return Issued(group, kind, peer, (2,), "bf16")

    fitting = [
        [issued("send", 1), issued("reduce", 0)],
        [issued("reduce", 0), issued("receive", 0)],
    ]
    assert_communications_fit(fitting)
    for other in ([issued("reduce", 1), issued("receive", 0)], [issued("reduce", 0)]):
        with pytest.raises(AssertionError):
            assert_communications_fit([fitting[0], other])
