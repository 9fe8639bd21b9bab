"""The CUDA code of every schedule, on GPUs that are not there: what can be known without one.

Streams are ordered wherever they share memory, memory goes back in time, the host never waits for
the device within a schedule, nothing grows, the ranks' communications fit one another and end, and
the memory is what a dry run says. Broken on purpose, each of these is found.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from correctness.job import Job, Layout
from correctness.schedule_cases import job, layout, sparse_cover
from pretended_gpu.deadlock import ENDS, stuck
from pretended_gpu.order import Issued
from pretended_gpu.paper_memory import memory, paper_config
from pretended_gpu.pool import GpuPool, gpu_pool
from pretended_gpu.rank import Findings, run_loop, run_rank
from reference.plain_gpt import GPTOptions

from megatron.layers.vocabulary import ShardState
from megatron.parallel import lanes
from megatron.runtime import pipeline
from megatron.runtime.stage_passes import StagePasses
from megatron.schedules.check import expected_passes
from megatron.schedules.lower import Start
from megatron.training.config import RunConfig
from megatron.training.run_plan import make_run_plan

ITERATIONS = 3
EVALUATIONS = 1
"""At the end of what every rank does."""

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None or sys.platform != "linux",
    reason="needs PyTorch's CPU build, on Linux: a CUDA build has real devices, and elsewhere "
    "nothing can be put in their place",
)


@pytest.fixture(scope="module")
def gpus() -> Iterator[GpuPool]:
    with gpu_pool() as pool:
        yield pool


def run(config: RunConfig, rank: int) -> Findings:
    return run_rank(config, rank)


def run_observed(config: RunConfig, rank: int) -> Findings:
    return run_rank(config, rank, observed=True)


def assert_sound(found: list[Findings]) -> None:
    """Nothing was found on any rank, nothing grows, and the ranks fit one another."""
    assert [own.faults for own in found] == [[] for _ in found]
    for own in found:
        assert len(set(own.held[1:])) == 1, own.held  # the optimizer's moments come with a step
    assert_communications_fit([own.issued for own in found])
    for held_up in (False, True):
        assert stuck([own.journal for own in found], held_up) == []


def assert_communications_fit(issued: list[list[Issued]]) -> None:
    """Collectives come in one order on all ranks, transfers in one order on both."""
    for group in ("vocabulary", "control", ENDS, "state"):
        collectives = [
            [each for each in own if each.group == group and not each.is_transfer] for own in issued
        ]
        taking_part = [own for own in collectives if own]
        assert all(own == taking_part[0] for own in taking_part), group
        assert len(taking_part) in (0, 2 if group == ENDS else len(issued)), group
    for group in ("forward", "backward", "state"):
        for sender, own in enumerate(issued):
            for receiver, other in enumerate(issued):
                sent = _transfers(own, group, "send", receiver)
                assert sent == _transfers(other, group, "receive", sender), (group, sender)
                assert sender != receiver or not sent


def _transfers(own: list[Issued], group: str, kind: str, peer: int) -> list[tuple]:
    return [
        (each.shape, each.dtype)
        for each in own
        if (each.group, each.kind, each.peer) == (group, kind, peer)
    ]


@pytest.mark.parametrize(("schedule", "treatment", "p", "tied"), sparse_cover())
def test_every_schedule_and_treatment(
    schedule: str, treatment: str, p: int, tied: bool, gpus: GpuPool, tmp_path: Path
) -> None:
    config = job(p, tied).config(layout(schedule, treatment, p, tmp_path), torch.bfloat16)
    found = gpus.map(run, config, ranks=p)
    assert_sound(found)
    by_group = {each.group: set() for own in found for each in own.issued}
    for own in found:
        for each in own.issued:
            by_group[each.group].add(each.kind)
    transfers = {"send", "receive"}
    assert by_group["forward"] == by_group["backward"] == transfers
    assert not by_group.get("vocabulary", set()) & transfers


VARIANTS = {
    "fp32": {},
    "fp32 groups": {"num_query_groups": 2},
    "groups": {"num_query_groups": 2},
    "rope": {"position_embedding_type": "rope", "rotary_percent": 0.5, "qk_layernorm": True},
    "llama": {
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
    },
    "loss": {"label_smoothing": 0.1, "z_loss_coeff": 1e-3, "logit_softcap": 5.0},
    "empty shard": {"vocab_size": 4},
}


@pytest.mark.parametrize("treatment", ["vocab-2", "vocab-1", "naive"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_model(variant: str, treatment: str, gpus: GpuPool) -> None:
    options = GPTOptions(num_layers=2, **VARIANTS[variant])
    dtype = torch.float32 if "fp32" in variant else torch.bfloat16
    config = Job(options, microbatches=4, dropout=0.1).config(Layout(2, treatment), dtype)
    assert_sound(gpus.map(run, config, ranks=2))


@pytest.mark.parametrize(
    ("sent", "abandoned"), [(1.0, 0), (100.0, 2)], ids=["right guess", "wrong guess"]
)
def test_steps_validated_later(sent: float, abandoned: int, gpus: GpuPool) -> None:
    """A wrong guess is undone; the schedule that was begun is abandoned, and run anew.

    The first rank's own norm is 1 and needs no clipping; what it hears of the whole is ``sent``.
    """
    config = Job(GPTOptions(num_layers=4), microbatches=4).config(Layout(3, "vocab-2", "zb-2p"))
    config = replace(config, optimizer=replace(config.optimizer, post_validation=True, clip_grad=5))
    found = gpus.map(run_hearing, config, sent, ranks=3)
    assert_sound(found)
    first = _transfers(found[0].issued, "forward", "send", 1)
    assert len(first) == 4 * (ITERATIONS + abandoned + EVALUATIONS)
    assert [own.restored for own in found] == [ITERATIONS if abandoned else 0, 0, 0]


def run_hearing(config: RunConfig, sent: float, rank: int) -> Findings:
    return run_rank(config, rank, iterations=ITERATIONS, number_of_others=sent)


def test_nothing_grows_later_either(gpus: GpuPool) -> None:
    config = Job(GPTOptions(num_layers=4), microbatches=5).config(Layout(2, "vocab-2", "zb-v"))
    found = gpus.map(run_longer, config, ranks=2)
    assert_sound(found)
    assert [len(own.held) for own in found] == [8, 8]


def run_longer(config: RunConfig, rank: int) -> Findings:
    return run_rank(config, rank, iterations=8)


def test_observers_see_every_pass_and_make_nobody_wait(gpus: GpuPool) -> None:
    config = Job(GPTOptions(num_layers=4), microbatches=5).config(Layout(2, "vocab-2", "zb-v"))
    plan = make_run_plan(config).plan
    found = gpus.map(run_observed, config, ranks=2)
    assert_sound(found)
    for rank, own in enumerate(found):
        passes = expected_passes(plan, rank)
        recorded = [(s.kind, s.microbatch, s.chunk) for s in own.spans if s.lane == "compute"]
        assert recorded == [(p.kind, p.microbatch, p.chunk) for p in plan.rows[rank]]
        assert {str(p) for p in passes} <= set(own.ranges)
        assert {"C1 4", "wait C1 4"} <= set(own.ranges)


def test_the_whole_loop(gpus: GpuPool) -> None:
    job = Job(GPTOptions(num_layers=2), microbatches=3, iterations=4)
    found = gpus.map(run_loop, job.config(Layout(2, "vocab-2")), ranks=2)
    (printed, first), (silence, last) = found
    assert (first, last, silence) == ([], [], "")
    assert "table: NVIDIA H200" in printed
    assert printed.count("lm loss: ") == printed.count("validation loss") == 4
    assert printed.count("max allocated") == 2


@pytest.mark.parametrize(
    ("schedule", "treatment", "vocab_size"),
    [("1f1b", "none", 32_768), ("1f1b", "vocab-2", 262_144), ("v-half", "vocab-1", 131_072)],
)
def test_memory_is_what_a_dry_run_says(
    schedule: str, treatment: str, vocab_size: int, gpus: GpuPool
) -> None:
    """The paper's model for 8 GPUs, at half its depth."""
    own = memory(paper_config(Layout(8, treatment, schedule), vocab_size, layers=16), gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=0.025)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("variant", ["groups", "rope", "llama"])
def test_memory_of_other_models(variant: str, schedule: str, gpus: GpuPool) -> None:
    """Long microbatches, in which activations count for more."""
    config = paper_config(
        Layout(2, "vocab-2", schedule), 32_768, layers=4, micro_batch_size=4, **VARIANTS[variant]
    )
    own = memory(config, gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=0.035)


def a_lane_that_does_not_wait_for_its_caller() -> object:
    def submit(self, work):
        with torch.cuda.stream(self._stream), torch.no_grad():
            value = work()
        return lanes._StreamResult(work, value, self._stream.record_event())

    return patch.object(lanes.StreamLane, "submit", submit)


def a_result_that_nobody_waits_for() -> object:
    return patch.object(lanes._StreamResult, "wait", lambda self: self._value)


def a_result_that_the_allocator_does_not_know_of() -> object:
    def wait(self):
        torch.cuda.current_stream().wait_event(self._done)
        return self._value

    return patch.object(lanes._StreamResult, "wait", wait)


def a_gradient_that_is_dropped_unrecorded() -> object:
    def drop(self):
        self.raw_gradient_nh = self.target_gradient_nh = None

    return patch.object(ShardState, "drop_gradient", drop)


def _after_forward(act) -> object:
    forward = StagePasses.forward

    def and_more(self, item):
        forward(self, item)
        act(self.model)

    return patch.object(StagePasses, "forward", and_more)


def a_pass_that_looks_at_a_number() -> object:
    return _after_forward(lambda model: float(next(model.parameters()).detach().sum()))


def a_pass_that_sends_a_number() -> object:
    return _after_forward(lambda model: torch.tensor([1.0]).to(next(model.parameters()).device))


def a_pass_that_takes_indices_from_the_host() -> object:
    return _after_forward(lambda model: next(model.parameters()).detach()[torch.tensor([0])])


def a_pass_that_asks_a_mask_how_many() -> object:
    def overwrite(model):
        copy = next(model.parameters()).detach().clone()
        copy[copy > 0] = copy.flatten()

    return _after_forward(overwrite)


def a_batch_in_pageable_memory() -> object:
    def move(tensor, device):
        return tensor.to(device, non_blocking=True)

    return patch("megatron.runtime.batch._moved", move)


def a_pass_that_synchronizes() -> object:
    return _after_forward(lambda model: torch.cuda.synchronize())


def a_pass_that_keeps_something() -> object:
    kept: list[torch.Tensor] = []
    return _after_forward(lambda model: kept.append(next(model.parameters()).clone()))


FAULTS = {
    a_lane_that_does_not_wait_for_its_caller: "which it does not wait for",
    a_result_that_nobody_waits_for: "which it does not wait for",
    a_result_that_the_allocator_does_not_know_of: "memory of stream 1 is free",
    a_gradient_that_is_dropped_unrecorded: "memory of passes is free",
    a_pass_that_looks_at_a_number: "the host waits: for a number",
    a_pass_that_sends_a_number: "the host waits: aten._to_copy.default between host and device",
    a_pass_that_takes_indices_from_the_host: "aten.index.Tensor between host and device",
    a_pass_that_asks_a_mask_how_many: "aten.index_put_.default with a mask",
    a_batch_in_pageable_memory: "the host waits: aten._to_copy.default between host and device",
    a_pass_that_synchronizes: "the host waits: torch.cuda.synchronize",
}


def run_with(fault, config: RunConfig, rank: int) -> Findings:
    with fault():
        return run_rank(config, rank)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_is_broken_is_found(fault, gpus: GpuPool) -> None:
    config = Job(GPTOptions(num_layers=2), microbatches=3).config(Layout(2, "vocab-2"))
    for own in gpus.map(run_with, fault, config, ranks=2):
        assert any(FAULTS[fault] in what for what in own.faults), own.faults


def test_what_grows_is_found(gpus: GpuPool) -> None:
    config = Job(GPTOptions(num_layers=2), microbatches=3).config(Layout(2, "vocab-2"))
    found = gpus.map(run_with, a_pass_that_keeps_something, config, ranks=2)
    assert all(a < b for own in found for a, b in pairwise(own.held))
    with pytest.raises(AssertionError):
        assert_sound(found)


def other_order_on_one_rank(rank: int) -> object:
    """Exchange the broadcast of X with the reduction that is started next, of the embeddings."""
    lower = pipeline.lower

    def lower_and_exchange(plan, costs):
        program = lower(plan, costs)
        if rank != 0:
            return program
        row = list(program.rows[0])
        comms = [n for n, s in enumerate(row) if isinstance(s, Start) and s.comm.kind[0] == "C"]
        kinds = [row[n].comm.kind for n in comms]
        n = next(n for n in range(len(comms)) if kinds[n : n + 2] == ["CIF", "C0"])
        one, other = comms[n : n + 2]
        row[one], row[other] = row[other], row[one]
        return replace(program, rows=(tuple(row), program.rows[1]))

    return patch.object(pipeline, "lower", lower_and_exchange)


def run_in_other_order(config: RunConfig, rank: int) -> Findings:
    with other_order_on_one_rank(rank):
        return run_rank(config, rank)


def test_another_order_is_found(gpus: GpuPool) -> None:
    config = Job(GPTOptions(num_layers=2), microbatches=5).config(Layout(2, "vocab-2"))
    found = gpus.map(run_in_other_order, config, ranks=2)
    with pytest.raises(AssertionError, match="vocabulary"):
        assert_communications_fit([own.issued for own in found])


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
