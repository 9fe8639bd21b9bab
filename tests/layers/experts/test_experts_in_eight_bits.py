"""Experts in 8 bits: the same as a linear layer in 8 bits for each expert, and near to fp32."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import pytest
import torch
from harness.mixtures import mixture
from torch import Tensor

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.block_multiplier import BlockMultiplier, GroupedBlockMultiplier, InBlocks
from megatron.layers.eight_bit_settings import EightBitSettings, Format, Recipe, types_of
from megatron.layers.eight_bits import EightBitProducts, Multiplier
from megatron.layers.experts.eight_bit_products import EightBitGroupedProducts, GroupedMultiplier
from megatron.layers.kernel_multiplier import KernelMultiplier, Quantised
from megatron.layers.main_grad import main_grad_of
from megatron.layers.recompute import NO_RECOMPUTATION, Part, Recomputation, again
from megatron.layers.scales import GRADIENT, INPUT, DelayedScales, OwnScales, Scaling
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.model.eight_bits import EightBitLayers, linear_layers
from megatron.model.ownership import owned_by
from megatron.optimizer.bucket import Bucket
from megatron.parallel.tensor import ALONE

CPU, KERNELS, FP32 = torch.device("cpu"), ReferenceKernels(), torch.float32
EXPERTS, IN, OUT = 4, 32, 48
SIZES = (5, 0, 16, 3)
"""Slots of every expert; one has none."""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grouped(
    scaling: Scaling, form: Format, experts: int = EXPERTS
) -> EightBitGroupedProducts[Quantised]:
    matrices = torch.empty(experts, OUT, IN)
    return EightBitGroupedProducts(GroupedMultiplier(KERNELS, FP32, form, scaling, matrices))


def of_one(
    products: EightBitProducts[Any], x: Tensor, grad: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of the input, and twice the weight's gradient, of a linear layer."""
    factor, kept = products.of_input(x, ALONE)
    other, kept_grad = products.of_gradient(grad, ALONE)
    total = torch.empty(OUT, IN)
    for begins in (True, False):
        own = (
            products.start_gradient_again(kept_grad, ALONE).wait(),
            products.start_input_again(kept, ALONE).wait(),
        )
        products.accumulate_(total, *own, begins=begins)
    return products.output(factor, weight, None), products.input_gradient(other, weight), total


def of_loop(
    loop: Sequence[Multiplier[Any]],
    x: Tensor,
    grad: Tensor,
    weights: Tensor,
    sizes: tuple[int, ...] = SIZES,
) -> tuple[Tensor, ...]:
    """As ``of_one``, of all experts; a linear layer without tokens only rounds its weight."""
    found = []
    for multiplier, *given in zip(loop, x.split(sizes), grad.split(sizes), weights, strict=True):
        if len(given[0]):
            found.append(of_one(EightBitProducts(multiplier), *given))
        else:
            multiplier.weight(given[2])
            found.append((torch.empty(0, OUT), torch.empty(0, IN), torch.zeros(OUT, IN)))
    outputs, x_grads, totals = zip(*found, strict=True)
    return torch.cat(outputs), torch.cat(x_grads), torch.stack(totals)


def of_all(
    layer: EightBitGroupedProducts[Any],
    x: Tensor,
    grad: Tensor,
    weights: Tensor,
    ends: Tensor,
) -> tuple[Tensor, ...]:
    """As ``of_one``, of a layer of experts."""
    layer.begin()
    factor, kept = layer.factor(INPUT, x, ends, keeps=True)
    other, kept_grad = layer.factor(GRADIENT, grad, ends, keeps=True)
    total = torch.empty(EXPERTS, OUT, IN)
    for begins in (True, False):
        factors = layer.again(GRADIENT, kept_grad, ends), layer.again(INPUT, kept, ends)
        layer.accumulate_(total, *factors, begins=begins)
    assert torch.equal(layer.weight_gradient(*factors) * 2, total)
    return layer.output(factor, weights), layer.input_gradient(other, weights), total


@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_layer_is_a_loop_over_linear_layers(recipe: str, form: Format) -> None:
    """To the last bit, over iterations in which experts have other numbers than before."""
    ends = torch.tensor(SIZES).cumsum(0).int()
    weights = drawn(EXPERTS, OUT, IN, seed=0)
    names = [str(number) for number in range(EXPERTS)]
    types = types_of(form)
    ours = DelayedScales(("layer",), types, KERNELS, CPU, experts={"layer": EXPERTS}, length=2)
    theirs = DelayedScales(names, types, KERNELS, CPU, length=2)
    own = ours.of_layer("layer", range(EXPERTS))
    layer = grouped(own if recipe == "delayed" else OwnScales(KERNELS), form)
    loop = [
        KernelMultiplier(KERNELS, FP32, form, scaling)
        for scaling in (
            theirs.of_layer(name) if recipe == "delayed" else OwnScales(KERNELS) for name in names
        )
    ]
    for iteration in range(3):
        for scales in (ours, theirs):
            scales.begin(records=True)
        x = drawn(sum(SIZES), IN, seed=2 * iteration + 1) * 3.0**iteration
        grad = drawn(sum(SIZES), OUT, seed=2 * iteration + 2) * 1e-6
        found, wanted = of_all(layer, x, grad, weights, ends), of_loop(loop, x, grad, weights)
        assert all(map(torch.equal, found, wanted))
        assert not found[2][1].any(), "an expert without slots"
        for scales in (ours, theirs):
            scales.end(lambda largest: None)
        states = ours.tensors()["layer"]
        for expert, name in enumerate(names):
            if SIZES[expert]:
                assert torch.equal(states[expert], theirs.tensors()[name])
        assert not states[1, [0, 2], :-1].any()
        if iteration == 0:
            least = states[[0, 2, 3], :, -1].amin(0)
        assert torch.equal(states[1, [0, 2], -1], least[[0, 2]]), "scales of the layer's largest"


@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_a_layer_with_scales_of_blocks_is_a_loop_over_linear_layers(form: Format) -> None:
    """To the last bit; an expert has less than a block of slots, or more, or none."""
    sizes = (5, 0, 130, 3)
    ends = torch.tensor(sizes).cumsum(0).int()
    weights = drawn(EXPERTS, OUT, IN, seed=0)
    x, grad = drawn(sum(sizes), IN, seed=1), drawn(sum(sizes), OUT, seed=2) * 1e-6
    layer = EightBitGroupedProducts[InBlocks](GroupedBlockMultiplier(KERNELS, FP32, form))
    found = of_all(layer, x, grad, weights, ends)
    loop = [BlockMultiplier(KERNELS, FP32, form)] * EXPERTS
    wanted = of_loop(loop, x, grad, weights, sizes)
    assert all(map(torch.equal, found, wanted))
    assert not found[2][1].any(), "an expert without slots"


def trained(
    eight_bits: EightBitSettings | None,
    recomputation: Recomputation = NO_RECOMPUTATION,
    *,
    splits: bool = False,
    tokens: int = 8,
) -> list[Tensor]:
    """Outputs and gradients of two iterations of a mixture."""
    site = Site(CPU, FP32, given_kernels=KERNELS, recomputation=recomputation)
    widths: dict[str, Any] = {"moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 16}
    made = mixture(EXPERTS, 2, **widths).layer(IN, site)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=generator)
    Bucket(list(owned_by(made, "x.")), KERNELS)
    layers = None
    if eight_bits is not None:
        layers = EightBitLayers(eight_bits, linear_layers(made, "x."), site)
    work: list[Callable[[], None]] = []
    defer_weight_gradients(made, work.append if splits else None)
    found = []
    for _ in range(2):
        if layers is not None:
            layers.begin(training=True)
        x_buh = torch.randn(2, tokens // 2, IN, generator=generator).requires_grad_()
        y_buh = again(made, x_buh) if recomputation.group else made(x_buh)
        y_buh.square().sum().backward()
        while work:
            work.pop(0)()
        if layers is not None:
            layers.end(lambda largest: None)
        assert x_buh.grad is not None
        found += [y_buh.detach(), x_buh.grad]
    return [*found, *(main_grad_of(each).clone() for each in made.parameters())]


@pytest.mark.parametrize("wide", [False, True], ids=["narrow W", "wide W"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("part", [None, "moe", "moe_act", "all"])
def test_a_split_backward_and_recomputation_change_no_bit(
    part: Part | Literal["all"] | None, recipe: Recipe, wide: bool
) -> None:
    own = EightBitSettings("hybrid", recipe, wide_weight_gradients=wide)
    recomputation = NO_RECOMPUTATION
    if part == "all":
        recomputation = Recomputation(group=1)
    elif part is not None:
        recomputation = Recomputation(frozenset((part,)))
    wanted = trained(own)
    for splits in (False, True):
        found = trained(own, recomputation, splits=splits)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_experts_are_rounded_by_what_8_bits_allow(form: Format, recipe: Recipe) -> None:
    """3 bits of mantissa are off by 1/16 at most, 2 bits by 1/8, and most numbers by far less."""
    exact = trained(None, tokens=64)
    for own, want in zip(trained(EightBitSettings(form, recipe), tokens=64), exact, strict=True):
        assert own.isfinite().all()
        error = float((own - want).norm() / want.norm())
        assert 0.005 < error < 0.2


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_experts_without_a_token_are_right(recipe: Recipe) -> None:
    """Of two tokens with two experts each, at least one of four has none in an iteration."""
    assert all(
        each.isfinite().all() for each in trained(EightBitSettings("hybrid", recipe), tokens=2)
    )


def test_every_rank_knows_the_scales_of_all_experts() -> None:
    """Ranks with different experts take the maximum of what they saw, and so agree on all."""
    types = types_of("hybrid")
    make = partial(DelayedScales, ("layer",), types, KERNELS, CPU, experts={"layer": EXPERTS})
    first, second, whole = make(), make(), make()
    x, ends = drawn(4, IN, seed=0), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    half = torch.tensor([1, 2], dtype=torch.int32)
    pieces = ((first, range(2), x[:2], half), (second, range(2, 4), x[2:], half))
    for scales, own, rows, own_ends in (*pieces, (whole, range(4), x, ends)):
        scales.begin(records=True)
        layer = grouped(scales.of_layer("layer", own), "hybrid", len(own))
        layer.factor(INPUT, rows, own_ends, keeps=False)
    seen: list[Tensor] = []
    for scales in (first, second):
        scales.end(seen.append)

    def agree(largest: Tensor) -> None:
        largest.copy_(torch.maximum(*seen))

    for scales in (first, second, whole):
        scales.begin(records=True)
        scales.end(agree)
    state = whole.tensors()["layer"]
    assert torch.equal(state[:, 0, 0], x.abs().amax(1))
    assert torch.equal(state, first.tensors()["layer"])
    assert torch.equal(state, second.tensors()["layer"])
