"""A linear layer by Transformer Engine: products by arithmetic alone, what is kept, what is moved.

The package is not here. In its place is one with its signatures (``kernels.engine_stand_in``).
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from kernels.engine_stand_in import Float8CurrentScalingQuantizer, general_gemm, installed
from layers.narrow_linear import CPU, KERNELS, forward_backward, linear
from reference.plain_eight_bits import E4M3, GRADIENTS, Rounding
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.kernels.cuda.transformer_engine import load_transformer_engine
from megatron.layers.eight_bit_settings import Format, Recipe, types_of
from megatron.layers.eight_bits import EightBitProducts, Multiplier
from megatron.layers.engine_multiplier import EngineMultiplier, Rounded
from megatron.layers.kernel_multiplier import KernelMultiplier
from megatron.layers.linear import Linear, Way, _WeightGradient
from megatron.layers.main_grad import forget_main_grad, main_grad_of
from megatron.layers.products import PlainProducts, Products
from megatron.layers.scales import DelayedScales
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.layers.wide_weight_gradients import WideWeightGradients
from megatron.parallel.lanes import Done
from megatron.parallel.tensor import ALONE, TensorParallel

IN, OUT, TOKENS = 160, 96, 64
RECIPES = pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
SPLIT = pytest.mark.parametrize("split", [False, True], ids=["B", "B and W"])
Work = Callable[[], None]


@pytest.fixture(autouse=True)
def package() -> Iterator[None]:
    """The package is there, and its GPU is a Hopper."""
    with installed():
        yield


def multiplier(recipe: Recipe, form: Format = "hybrid") -> EngineMultiplier:
    return EngineMultiplier(load_transformer_engine(), torch.float32, form, recipe, CPU)


def engine_products(
    recipe: Recipe, form: Format = "hybrid", *, keeps_input: bool = False
) -> EightBitProducts[Rounded]:
    return EightBitProducts(multiplier(recipe, form), keeps_input=keeps_input)


def layer_of(
    products: Products[Any],
    *,
    bias: bool = True,
    tensor: TensorParallel = ALONE,
    parallel: Way | None = None,
) -> Linear:
    return linear((IN, OUT), products, bias=bias, tensor=tensor, parallel=parallel)


def microbatch(seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of many magnitudes, so that scales of blocks differ."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(2, TOKENS // 2, k, generator=generator) for k in (IN, OUT))
    spread = torch.exp2(torch.randint(-6, 6, (2, TOKENS // 2, 1), generator=generator))
    return (x * spread).requires_grad_(), grad * spread * 1e-6


def run(layer: Linear, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The output and the gradient of the input."""
    return forward_backward(layer, microbatch(seed))


def close(found: Tensor, expected: Tensor) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < 1e-6, error


@pytest.mark.parametrize("again", [False, True], ids=["8 bits kept", "input kept"])
@SPLIT
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
@pytest.mark.parametrize("hopper", [True, False], ids=["Hopper", "Blackwell"])
@RECIPES
def test_products_are_of_rounded_factors(
    recipe: Recipe, hopper: bool, form: Format, split: bool, again: bool
) -> None:
    with installed(hopper=hopper):
        layer = layer_of(engine_products(recipe, form, keeps_input=again))
        later: list[Work] = []
        defer_weight_gradients(layer, later.append if split else None)
        rounding, w = Rounding(recipe, GRADIENTS[form]), layer.weight.detach()
        expected = torch.zeros(OUT, IN, dtype=torch.float64)
        exact = torch.zeros(OUT, IN, dtype=torch.float64)
        for seed in range(2):
            y, x_grad = run(layer, seed)
            x, grad = (tensor.detach().flatten(0, 1) for tensor in microbatch(seed))
            rows = rounding.rows(E4M3, x) @ rounding.rows(E4M3, w, square=True).T
            close(y.flatten(0, 1), rows + layer.bias.detach().double())
            back = rounding.rows(rounding.gradients, grad)
            close(x_grad.flatten(0, 1), back @ rounding.columns(E4M3, w, square=True))
            expected += rounding.columns(rounding.gradients, grad).T @ rounding.columns(E4M3, x)
            exact += grad.double().T @ x.double()
        assert len(later) == 2 * split
        while later:
            later.pop(0)()
    close(main_grad_of(layer.weight), expected)
    assert 1e-3 < float((expected - exact).norm() / exact.norm()) < 0.2, "it is rounded"


def test_scales_of_blocks_are_finer() -> None:
    """What is small beside the rest of its tensor, but not of its block, is not lost."""
    errors = {}
    recipes: tuple[Recipe, ...] = "tensorwise", "blockwise", "mxfp8"
    for recipe in recipes:
        layer = layer_of(engine_products(recipe), bias=False)
        x = microbatch(0)[0].detach()
        x[0, 0] *= 1e8
        y, exact = layer(x)[1].detach(), x[1] @ layer.weight.detach().T
        errors[recipe] = float((y - exact).norm() / exact.norm())
    assert errors["mxfp8"] < 0.05 > errors["blockwise"]
    assert errors["tensorwise"] > 0.5


@SPLIT
def test_weight_gradients_may_stay_wide(split: bool) -> None:
    layer = layer_of(
        EightBitProducts(WideWeightGradients(multiplier("mxfp8"), PlainProducts(KERNELS)))
    )
    later: list[Work] = []
    defer_weight_gradients(layer, later.append if split else None)
    y, _ = run(layer)
    while later:
        later.pop(0)()
    x, grad = (tensor.detach() for tensor in microbatch(0))
    exact = grad.flatten(0, 1).T @ x.flatten(0, 1)
    torch.testing.assert_close(main_grad_of(layer.weight), exact)
    wide = torch.nn.functional.linear(x, layer.weight, layer.bias).detach()
    assert 1e-3 < float((y - wide).norm() / wide.norm()) < 0.2


@SPLIT
def test_delayed_scales_are_those_of_the_own_kernels(split: bool) -> None:
    """Both see the same magnitudes, and round by the same scales."""
    found = []
    for through_package in (True, False):
        scales = DelayedScales(("layer",), types_of("hybrid"), KERNELS, CPU, length=2)
        scaling = scales.of_layer("layer")
        own: Multiplier[Any] = KernelMultiplier(KERNELS, torch.float32, "hybrid", scaling)
        if through_package:
            engine = load_transformer_engine()
            own = EngineMultiplier(engine, torch.float32, "hybrid", "delayed", CPU, scaling)
        products = EightBitProducts(own)
        layer, later = layer_of(products), list[Work]()
        defer_weight_gradients(layer, later.append if split else None)
        values: list[Tensor] = []
        for iteration in range(3):
            scales.begin(records=True)
            products.begin()
            for seed in range(2):
                values += run(layer, 2 * iteration + seed)
            while later:
                later.pop(0)()
            scales.end(lambda largest: None)
            values.append(scales.tensors()["layer"].clone())
        scales.begin(records=False)  # an evaluation, which leaves no trace
        products.begin()
        values += [layer(microbatch(9)[0]).detach(), scales.tensors()["layer"]]
        found.append([*values, main_grad_of(layer.weight)])
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs.double())


@SPLIT
@RECIPES
def test_what_is_kept_are_columns_in_8_bits(recipe: Recipe, split: bool) -> None:
    layer, kept = layer_of(engine_products(recipe), bias=False), list[Tensor]()
    later: list[Work] = []
    defer_weight_gradients(layer, later.append if split else None)
    x, grad = microbatch(0)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    scales, numbers = sorted(kept, key=torch.numel)
    assert (numbers.dtype, numbers.numel()) == (torch.uint8, x.numel())
    assert scales.numel() * 8 < x.numel(), "a scale for 32 numbers, and padding"
    y.backward(grad)
    factors = [t for work in later for cell in _cells(work) for t in cell]
    assert [t.numel() for t in factors if t.dtype == torch.uint8 and t.numel() > 9999] == (
        [x.numel()] if split else []
    )
    assert sum(t.element_size() * t.numel() for t in factors) < 1.3 * (x.numel() + grad.numel())


def _cells(work: Work) -> list[tuple[Tensor, ...]]:
    """What a deferred product keeps of its two factors."""
    assert isinstance(work, _WeightGradient)
    return [work._grad, work._x]


class Gathering(TensorParallel):
    """Two ranks with their own tokens, of which the other has the same numbers as this one."""

    size, sequence_parts = 2, 2

    def gather(self, x_buh: Tensor) -> Tensor:
        return torch.cat([x_buh, x_buh], dim=1)

    def start_gather(self, x_buh: Tensor) -> Done[Tensor]:
        return Done(self.gather(x_buh))

    def reduce(self, partial_bsh: Tensor) -> Tensor:
        return partial_bsh[:, : partial_bsh.shape[1] // 2].clone()

    def start_reduction(self, partial_bsh: Tensor) -> Done[Tensor]:
        return Done(self.reduce(partial_bsh))


@SPLIT
@pytest.mark.parametrize("way", ["columns", "rows"])
@RECIPES
def test_ranks_gather_before_they_round(recipe: Recipe, way: Way, split: bool) -> None:
    """A rank with the others' tokens has the gradient of one that has all tokens itself."""
    x, grad = (tensor.detach() for tensor in microbatch(0))
    tensor = Gathering()
    whole = layer_of(engine_products(recipe), bias=False)
    shared = layer_of(engine_products(recipe), bias=False, tensor=tensor, parallel=way)
    with torch.no_grad():
        shared.weight.copy_(whole.weight)
    later: list[Work] = []
    defer_weight_gradients(shared, later.append if split else None)
    doubled = [tensor.gather(each) for each in (x, grad)]
    whole(doubled[0].requires_grad_()).backward(doubled[1])
    if way == "columns":
        shared(x.requires_grad_()).backward(doubled[1])
    else:
        shared(doubled[0].detach().requires_grad_()).backward(grad)
    while later:
        later.pop(0)()
    assert torch.equal(main_grad_of(shared.weight), main_grad_of(whole.weight))


class Counting(Float8CurrentScalingQuantizer):
    """Notes the tensors that it rounds, by their rows."""

    rows: list[int]

    def quantize(self, tensor: Tensor) -> Any:
        self.rows.append(len(tensor))
        return super().quantize(tensor)


def test_a_weight_is_rounded_once_an_iteration_and_all_else_once_a_pass() -> None:
    Counting.rows = []
    with installed(Float8CurrentScalingQuantizer=Counting):
        products = engine_products("tensorwise")
    layer = layer_of(products)
    for iteration in range(2):
        products.begin()
        for seed in range(3):
            run(layer, seed)
        assert Counting.rows.count(OUT) == iteration + 1
    assert Counting.rows.count(TOKENS) == 2 * 3 * 2, "an input and a gradient of every microbatch"


def test_the_gradient_of_a_weight_is_added_in_the_product() -> None:
    given: list[bool] = []

    def noting(*arguments: Any, **named: Any) -> Any:
        if named["layout"] == "NT":
            given.append(named["accumulate"])
            assert named["out"].data_ptr() == total.data_ptr()
        return general_gemm(*arguments, **named)

    with installed(general_gemm=wraps(general_gemm)(noting)):
        layer = layer_of(engine_products("blockwise"))
    total = main_grad_of(layer.weight).fill_(torch.nan)
    forget_main_grad(layer.weight)
    for seed in range(3):
        run(layer, seed)
    assert given == [False, True, True]
    assert total.isfinite().all()
