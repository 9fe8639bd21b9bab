"""Slots of captured passes: what leaves a slot is nobody's but the receiver's."""

import gc
from weakref import ref

import torch
from correctness.recorded_graph import RecordedGraph, recorded_graphs
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.parallel.groups import single_rank
from megatron.runtime.pass_graphs import StageGraphs
from megatron.runtime.pass_slots import StageInput
from megatron.training.setup import build_train_state

JOB = Job(GPTOptions(num_layers=2, vocab_size=37))
SHAPE = (1, JOB.sequence, JOB.options.hidden_size)


def stage_input() -> StageInput:
    return StageInput(torch.randn(SHAPE))


def stage_graphs() -> StageGraphs:
    """Of all layers, with a whole backward."""
    state = build_train_state(JOB.config(Layout(1, "none")), single_rank(torch.device("cpu")))
    graphs = StageGraphs(state.pipeline.model, recorded_graphs)
    graphs.begin()
    return graphs


def test_what_has_left_a_slot_stays_when_the_slot_is_used_again() -> None:
    graphs = stage_graphs()
    slot, (y, *_) = graphs.forward(0, stage_input(), None)
    gradient = slot.backward(torch.randn(SHAPE), 1.0).x_buh
    before = y.clone(), gradient.clone()
    again, (other_y, *_) = graphs.forward(0, stage_input(), None)
    other_gradient = again.backward(torch.randn(SHAPE), 1.0).x_buh
    assert again is slot
    assert torch.equal(y, before[0])
    assert torch.equal(gradient, before[1])
    assert not torch.equal(y, other_y)
    assert not torch.equal(gradient, other_gradient)


def test_microbatches_in_flight_have_slots_of_their_own() -> None:
    graphs = stage_graphs()
    first, _ = graphs.forward(0, stage_input(), None)
    second, _ = graphs.forward(0, stage_input(), None)
    assert first is not second
    first.backward(torch.randn(SHAPE), 1.0)
    assert graphs.forward(0, stage_input(), None)[0] is first


def test_an_iteration_that_was_abandoned_leaves_all_slots_free() -> None:
    graphs = stage_graphs()
    slots = {graphs.forward(0, stage_input(), None)[0] for _ in range(2)}
    graphs.begin()
    assert {graphs.forward(0, stage_input(), None)[0] for _ in range(2)} == slots


def test_a_job_that_ends_lets_go_of_the_graphs_that_it_has_captured() -> None:
    """NCCL would wait for ever for graphs that hold its collectives."""
    graphs = stage_graphs()
    for _ in range(2):
        graphs.forward(0, stage_input(), None)[0].backward(torch.randn(SHAPE), 1.0)
    graphs.forward(0, stage_input(), None)
    graphs.forward(0, stage_input(), None)
    before = RecordedGraph.resets
    graphs.close()
    assert RecordedGraph.resets - before == 3  # F and B of the first slot, F of the second


def test_graphs_that_are_let_go_of_free_their_memory_at_once() -> None:
    """A plan is replaced while the run goes on, and its graphs hold memory of the device."""
    graphs = stage_graphs()
    slot, left = graphs.forward(0, stage_input(), None)
    slot.backward(torch.randn(SHAPE), 1.0)
    watched = ref(slot)
    gc.disable()
    try:
        graphs.close()
        del slot, left
        assert watched() is None
    finally:
        gc.enable()
    assert graphs.slots == 0
