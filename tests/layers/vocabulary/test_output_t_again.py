"""A T that forms the logits again: the same losses and gradients, one product more, no logits kept.

Shapes: n tokens, h hidden size, v vocabulary entries of a shard, t rows of a tile.
"""

import itertools
from operator import attrgetter
from typing import Any

import pytest
import torch
from layers.vocabulary.sharded_output import (
    ALGORITHM_1,
    ALGORITHM_2,
    NAIVE,
    assert_equal,
    by_autograd,
    by_shards,
    draw,
    error,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron.kernels.choose import kernels_for
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.tiled.output_s import LEAST_TILES, tile_rows
from megatron.kernels.tiled.state import TiledState
from megatron.layers.main_grad import give_main_grad
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.layers.vocabulary.output_s import LossOptions, Merged, ShardState, merge_statistics
from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.schedules.treatments import Treatment

LOSSES = list(itertools.product([0.0, 0.1], [0.0, 1e-2], [0.0, 2.0]))
TREATMENTS = pytest.mark.parametrize(
    "treatment", [ALGORITHM_2, ALGORITHM_1, NAIVE], ids=attrgetter("name")
)
EVERY_LOSS = pytest.mark.parametrize(
    "losses", LOSSES, ids=lambda x: "smoothing {}, z {}, cap {}".format(*x)
)
NAMES = ("losses_n", "x_gradient_nh", "weight_gradient_vh")


@TREATMENTS
@EVERY_LOSS
def test_every_form_of_the_loss(losses: tuple[float, float, float], treatment: Treatment) -> None:
    """In float64 as autograd of the textbook's formula; in fp32 as near to it as rounding lets."""
    problem = draw(13, 8, 29, LossOptions(29, *losses))
    expected = by_autograd(problem)
    assert_equal(by_shards(problem, 3, treatment, 3, recompute=True), expected, 1e-12)
    single = problem.to(torch.float32)
    assert_equal(by_shards(single, 3, treatment, 3, recompute=True), expected, 1e-6)


@TREATMENTS
@pytest.mark.parametrize("losses", [LOSSES[0], LOSSES[2], LOSSES[5]])
def test_large_logits_do_not_overflow(
    losses: tuple[float, float, float], treatment: Treatment
) -> None:
    problem = draw(17, 8, 37, LossOptions(37, *losses), magnitude=1e3).to(torch.float32)
    answer = by_shards(problem, 4, treatment, 4, recompute=True)
    assert_equal(answer, by_autograd(problem), 1e-4)


@pytest.mark.parametrize(
    "kernels",
    [ReferenceKernels(), kernels_for(torch.device("cpu"), torch.bfloat16)],
    ids=lambda kernels: type(kernels).__name__,
)
@TREATMENTS
@pytest.mark.parametrize("losses", [LOSSES[0], LOSSES[-1]])
def test_bf16_is_as_exact_as_a_plain_implementation(
    losses: tuple[float, float, float], treatment: Treatment, kernels: Kernels
) -> None:
    problem = draw(150, 64, 1000, LossOptions(1000, *losses), magnitude=3.0).to(torch.bfloat16)
    exact, plain = by_autograd(problem.to(torch.float64)), by_autograd(problem)
    answer = by_shards(problem, 4, treatment, 100, kernels, recompute=True)
    for name in NAMES:
        own, usual = (error(getattr(a, name), getattr(exact, name)) for a in (answer, plain))
        assert own < 1.5 * usual, f"{name}: {own} where a plain implementation has {usual}"


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


N, H, V = 60, 4, 240


def make_layer(*, recompute: bool, at_most: int = 1000) -> OutputLayer:
    """A shard whose logits are larger than anything else there is."""
    weight = nn.Parameter(torch.ones(V, H))
    give_main_grad(weight, torch.zeros(V, H))
    shard, options = VocabularyShard.of(V, V, 0, 1), LossOptions(V, 0.1, 1e-2, 2.0)
    return OutputLayer(shard, weight, options, ReferenceKernels(at_most), recompute)


def s_and_merge(layer: OutputLayer, treatment: Treatment) -> tuple[ShardState, Merged]:
    x_nh, targets_n = torch.ones(N, H), torch.zeros(N, dtype=torch.int64)
    if not treatment.maximum_first:
        state = layer.s(x_nh, targets_n, form_gradient=treatment.gradient_pass == "S")
        return state, merge_statistics(state.statistics_4n.unsqueeze(0))
    state = layer.naive_s(x_nh, targets_n)
    maximum_n = state.maximum_n.clone()
    layer.naive_e(state, maximum_n)
    return state, layer.merged_from(maximum_n, state.sums_kn)


@TREATMENTS
def test_no_pass_holds_the_logits_of_a_shard(treatment: Treatment) -> None:
    found = {}
    for recompute in (False, True):
        with Largest() as largest:
            layer = make_layer(recompute=recompute)
            state, merged = s_and_merge(layer, treatment)
            form_gradient = treatment.gradient_pass == "T"
            layer.t(state, merged, torch.ones(N), form_gradient=form_gradient)
        found[recompute] = largest.elements
    assert found == {False: V * N, True: V * N // LEAST_TILES}


@TREATMENTS
def test_from_s_to_t_only_a_few_numbers_of_each_token_are_there(treatment: Treatment) -> None:
    state, _ = s_and_merge(make_layer(recompute=True), treatment)
    state.drop_gradient()
    held = [value for value in vars(state).values() if isinstance(value, Tensor)]
    assert isinstance(state, TiledState)
    assert not state.exp_tiles
    assert not state.slope_tiles
    assert sum(value.numel() for value in held if value is not state.x_nh) == 6 * N


@TREATMENTS
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_products_of_the_passes_are_those_that_are_counted(
    recompute: bool, treatment: Treatment
) -> None:
    """One more in T; both gradients come from one recomputation of a tile."""
    layer = make_layer(recompute=recompute, at_most=20)
    layer.options = LossOptions(V)
    with FlopCounterMode(display=False) as counter:
        state, merged = s_and_merge(layer, treatment)
    in_s, product = counter.get_total_flops(), 2 * N * H * V
    with FlopCounterMode(display=False) as counter:
        form_gradient = treatment.gradient_pass == "T"
        layer.t(state, merged, torch.ones(N), form_gradient=form_gradient)
    in_t = counter.get_total_flops()
    found = [in_s / product, in_t / product]
    assert found == [treatment.products_of(kind, recompute=recompute) for kind in ("S", "T")]


@pytest.mark.parametrize(
    ("rows", "at_most", "expected"), [(0, 1000, 1), (3, 1000, 1), (90, 1000, 23), (90, 7, 7)]
)
def test_a_tile_is_a_small_part_of_the_shard(rows: int, at_most: int, expected: int) -> None:
    assert tile_rows(rows, at_most) == expected
