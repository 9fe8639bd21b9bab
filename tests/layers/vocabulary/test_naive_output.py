"""The naive treatment's own promises; its losses and gradients are with those of the others.

Shapes: n tokens, h hidden size, v vocabulary entries.
"""

import torch
from layers.vocabulary.sharded_output import Problem, by_autograd, draw
from torch import Tensor, nn

from megatron.kernels.cpu.kernels import CpuKernels
from megatron.kernels.tiled.state import TiledState
from megatron.layers.main_grad import give_main_grad
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.layers.vocabulary.output_s import LossOptions, Merged, ShardState, token_losses
from megatron.layers.vocabulary.shard import VocabularyShard

V, SHARDS = 21, 5
OPTIONS = LossOptions(V, label_smoothing=0.1, z_loss_coeff=1e-2, logit_softcap=4.0)


def make_layers(problem: Problem, rows: int = 8) -> list[OutputLayer]:
    """Shards of ``rows`` rows: three of them real, in part or whole, then two of padding only."""
    layers = []
    for rank in range(SHARDS):
        shard = VocabularyShard.of(V, SHARDS * rows, rank, SHARDS)
        weight_vh = torch.full((rows, 6), 1e3, dtype=torch.float64)
        real_vh = problem.weight_vh[shard.first_row : shard.first_row + shard.real_rows]
        weight_vh[: shard.real_rows] = real_vh
        weight = nn.Parameter(weight_vh)
        give_main_grad(weight, torch.zeros_like(weight_vh))
        layers.append(OutputLayer(shard, weight, problem.options, CpuKernels(tile_rows=3)))
    return layers


def up_to_c2(layers: list[OutputLayer], problem: Problem) -> tuple[list[ShardState], Merged]:
    states = [layer.naive_s(problem.x_nh, problem.targets_n) for layer in layers]
    maximum_n = torch.stack([state.maximum_n for state in states]).amax(0)
    for layer, state in zip(layers, states, strict=True):
        layer.naive_e(state, maximum_n)
    sums_kn = torch.stack([state.sums_kn for state in states]).sum(0)
    return states, layers[0].merged_from(maximum_n, sums_kn)


def logits_of(layer: OutputLayer, problem: Problem) -> Tensor:
    """The capped logits of a shard, [n, v]."""
    return 4.0 * torch.tanh(problem.x_nh @ layer.real_weight.T / 4.0)


def test_s_leaves_the_maximum_and_e_the_sums() -> None:
    problem = draw(7, 6, V, OPTIONS)
    layers = make_layers(problem)
    states = [layer.naive_s(problem.x_nh, problem.targets_n) for layer in layers]
    logits = [logits_of(layer, problem) for layer in layers]
    for state, logits_nv in zip(states[:3], logits, strict=False):
        torch.testing.assert_close(state.maximum_n, logits_nv.amax(1))
    maximum_n = torch.cat(logits, 1).amax(1)
    for layer, state, logits_nv in zip(layers, states, logits, strict=True):
        layer.naive_e(state, maximum_n)
        exponentials_n = (logits_nv - maximum_n.unsqueeze(1)).exp().sum(1)
        torch.testing.assert_close(state.sums_kn[0], exponentials_n)
        torch.testing.assert_close(state.sums_kn[2], logits_nv.sum(1))
    target_n = torch.cat(logits, 1).gather(1, problem.targets_n.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(sum(state.sums_kn[1] for state in states), target_n)


def test_what_the_collectives_see_is_contiguous_fp32_also_on_a_shard_of_padding() -> None:
    problem = draw(7, 6, V, OPTIONS).to(torch.float32)
    layers = make_layers(problem)
    for layer in layers:
        layer.weight.data = layer.weight.data.float()
    states, _ = up_to_c2(layers, problem)
    for state in states:
        assert state.maximum_n.shape == (7,)
        assert state.sums_kn.shape == (3, 7)
        for tensor in (state.maximum_n, state.sums_kn):
            assert tensor.is_contiguous()
            assert tensor.dtype == torch.float32
    empty = layers[-1].naive_s(problem.x_nh, problem.targets_n)
    assert (empty.maximum_n == -torch.inf).all()
    assert not states[-1].sums_kn.any()


def test_evaluation_gives_the_losses_and_keeps_nothing_of_the_vocabulary() -> None:
    problem = draw(7, 6, V, OPTIONS)
    layers = make_layers(problem)
    for layer in layers:
        layer.eval()
    states, merged = up_to_c2(layers, problem)
    expected = by_autograd(problem).losses_n
    torch.testing.assert_close(token_losses(merged, OPTIONS), expected, rtol=1e-12, atol=1e-12)
    assert all(isinstance(state, TiledState) and not state.slope_tiles for state in states)
    assert not any(state.exp_tiles for state in states)


def test_iterations_use_the_same_buffers_again() -> None:
    """T gives back what S took; an evaluation in between takes nothing."""
    problem = draw(7, 6, V, OPTIONS)
    layers = make_layers(problem)[:1]
    places: list[set[int]] = []
    for _ in range(3):
        places.append(set())
        for _ in range(2):
            states, merged = up_to_c2(layers, problem)
            places[-1].add(states[0].exp_tiles[0].data_ptr())
            layers[0].t(states[0], merged, problem.weight_n)
        layers[0].eval()
        up_to_c2(layers, problem)
        layers[0].train()
    assert places[0] == places[1] == places[2]
