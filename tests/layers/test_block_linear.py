"""A linear layer with scales of blocks or of 32 numbers by the kernels: arithmetic, what is kept.

The results are those of the package Transformer Engine, too, and of ranks that share tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from kernels.engine_stand_in import installed
from layers.narrow_linear import CPU, KERNELS, forward_backward, linear
from layers.test_engine_products import Gathering
from reference.plain_eight_bits import E4M3, GRADIENTS, Rounding
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.kernels.cuda.transformer_engine import load_transformer_engine
from megatron.layers.block_multiplier import BlockMultiplier
from megatron.layers.eight_bit_settings import Format, Recipe
from megatron.layers.eight_bits import EightBitProducts
from megatron.layers.engine_multiplier import EngineMultiplier
from megatron.layers.linear import Linear, Way
from megatron.layers.main_grad import main_grad_of
from megatron.layers.mx_multiplier import MicroscalingMultiplier
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.parallel.tensor import ALONE, TensorParallel

IN, OUT, TOKENS = 160, 224, 192
"""Each is more than a block of 128, and no multiple of one."""
SPLIT = pytest.mark.parametrize("split", [False, True], ids=["B", "B and W"])
FORMS = pytest.mark.parametrize("form", ["e4m3", "hybrid"])
RECIPES = pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])


@dataclass(frozen=True)
class Trained:
    """What becomes of a microbatch."""

    y: Tensor
    x_grad: Tensor
    weight_grad: Tensor


def layer_of(
    recipe: Recipe,
    form: Format = "hybrid",
    *,
    keeps_input: bool = False,
    tensor: TensorParallel = ALONE,
    parallel: Way | None = None,
) -> Linear:
    multiplier = BlockMultiplier if recipe == "blockwise" else MicroscalingMultiplier
    products = EightBitProducts(multiplier(KERNELS, torch.float32, form), keeps_input=keeps_input)
    return linear((IN, OUT), products, bias=parallel is None, tensor=tensor, parallel=parallel)


def microbatch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Numbers of many magnitudes, so that scales of blocks differ."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(2, TOKENS // 2, k, generator=generator) for k in (IN, OUT))
    spread = torch.exp2(torch.randint(-12, 12, (2, TOKENS // 2, 1), generator=generator))
    return (x * spread).requires_grad_(), grad * spread * 1e-6


def trained(layer: Linear, *, split: bool) -> Trained:
    later: list[Callable[[], None]] = []
    defer_weight_gradients(layer, later.append if split else None)
    y, x_grad = forward_backward(layer, microbatch())
    assert len(later) == split
    while later:
        later.pop(0)()
    return Trained(y, x_grad, main_grad_of(layer.weight))


def close(found: Tensor, expected: Tensor) -> None:
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("again", [False, True], ids=["8 bits kept", "input kept"])
@SPLIT
@FORMS
@RECIPES
def test_products_are_of_rounded_factors(
    recipe: Recipe, form: Format, split: bool, again: bool
) -> None:
    layer = layer_of(recipe, form, keeps_input=again)
    found = trained(layer, split=split)
    rounding, w = Rounding(recipe, GRADIENTS[form]), layer.weight.detach()
    x, grad = (tensor.detach().flatten(0, 1) for tensor in microbatch())
    product = rounding.rows(E4M3, x) @ rounding.rows(E4M3, w, square=True).T
    close(found.y.flatten(0, 1), product + layer.bias.detach().double())
    back = rounding.rows(rounding.gradients, grad) @ rounding.columns(E4M3, w, square=True)
    close(found.x_grad.flatten(0, 1), back)
    weights = rounding.columns(rounding.gradients, grad).T @ rounding.columns(E4M3, x)
    close(found.weight_grad, weights)
    exact = grad.double().T @ x.double()
    assert 1e-3 < float((weights - exact).norm() / exact.norm()) < 0.2, "it is rounded"


@SPLIT
@FORMS
@RECIPES
def test_the_package_has_the_same_results(recipe: Recipe, form: Format, split: bool) -> None:
    own = trained(layer_of(recipe, form), split=split)
    with installed():
        engine = load_transformer_engine()
        products = EightBitProducts(EngineMultiplier(engine, torch.float32, form, recipe, CPU))
        theirs = trained(linear((IN, OUT), products), split=split)
    close(own.y, theirs.y)
    close(own.x_grad, theirs.x_grad)
    close(own.weight_grad, theirs.weight_grad)


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        pytest.param("blockwise", (2, IN), id="blockwise: one for 128 tokens, one for the others"),
        pytest.param("mxfp8", (256 * 8,), id="mxfp8: six for a feature, in whole tiles"),
    ],
)
def test_what_is_kept_are_columns_in_8_bits(recipe: Recipe, shape: tuple[int, ...]) -> None:
    layer, kept = layer_of(recipe), list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x, _ = microbatch()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    scales, numbers = sorted(kept, key=torch.numel)
    assert (numbers.element_size(), numbers.shape) == (1, (IN, TOKENS))
    assert scales.shape == shape


@SPLIT
@pytest.mark.parametrize("way", ["columns", "rows"])
@RECIPES
def test_ranks_gather_before_they_round(recipe: Recipe, way: Way, split: bool) -> None:
    """A rank with the others' tokens has the gradient of one that has all tokens itself."""
    x, grad = (tensor.detach() for tensor in microbatch())
    tensor = Gathering()
    whole, shared = layer_of(recipe), layer_of(recipe, tensor=tensor, parallel=way)
    later: list[Callable[[], None]] = []
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
