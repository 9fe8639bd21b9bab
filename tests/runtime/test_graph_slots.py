"""Slots of captured passes: what leaves a slot is nobody's but the receiver's."""

import gc
from weakref import ref

import torch
from correctness.recorded_graph import RecordedGraph, RecordedSlot
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.kernels.softmax import merge_statistics
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
    graphs = StageGraphs(state.pipeline.model, RecordedSlot)
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


def test_the_output_layer_has_a_slot_from_s_to_t() -> None:
    """What S has left for the barriers and for T stays while other microbatches are in S."""
    graphs = stage_graphs()
    layer = graphs._model.output_layer
    assert layer is not None
    n, h = JOB.sequence, JOB.options.hidden_size
    given = [(torch.randn(n, h), torch.randint(37, (n,))) for _ in range(3)]
    first, second = (graphs.vocabulary.output(layer, True, None) for _ in range(2))
    assert first is not second
    state = first.s(*given[0])
    before = state.statistics_4n.clone()
    second.s(*given[1])
    assert torch.equal(state.statistics_4n, before)
    merged = merge_statistics(state.statistics_4n[None])
    state.drop_gradient()  # as the barrier does; the next S of the slot writes there again
    assert first.t(merged, torch.ones(n)) == (None, None)
    assert graphs.vocabulary.output(layer, True, None) is first
    again, alone = first.s(*given[2]), layer.s(*given[2], form_gradient=True)
    assert torch.equal(again.statistics_4n, alone.statistics_4n)
    assert again.raw_gradient_nh is not None
    assert alone.raw_gradient_nh is not None
    assert torch.equal(again.raw_gradient_nh, alone.raw_gradient_nh)


def test_graphs_of_the_vocabulary_are_let_go_of_as_well() -> None:
    graphs = stage_graphs()
    layer, tokens_n = graphs._model.input_layer, torch.arange(JOB.sequence)
    assert layer is not None
    first = graphs.vocabulary.lookup(layer, tokens_n)
    second = graphs.vocabulary.lookup(layer, tokens_n + 1)
    assert torch.equal(first, layer.lookup(tokens_n))
    assert torch.equal(second, layer.lookup(tokens_n + 1))
    graphs.vocabulary.add_gradient(layer, tokens_n, first)
    before = RecordedGraph.resets
    graphs.close()
    assert RecordedGraph.resets - before == 2
    assert graphs.slots == 0
