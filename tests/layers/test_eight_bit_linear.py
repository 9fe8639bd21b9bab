"""A linear layer in 8 bits: its products by arithmetic alone, what it keeps, what it does when."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from kernels.implementations import of_a_gpu
from layers.narrow_linear import CPU, KERNELS, forward_backward, linear
from reference.plain_eight_bits import E4M3, GRADIENTS
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.kernels.eight_bits import EightBits
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.eight_bit_settings import Format, types_of
from megatron.layers.eight_bits import EightBitProducts
from megatron.layers.kernel_multiplier import KernelMultiplier, Quantised
from megatron.layers.linear import Linear, _WeightGradient
from megatron.layers.main_grad import main_grad_of
from megatron.layers.products import PlainProducts
from megatron.layers.scales import GRADIENT, INPUT, WEIGHT, DelayedScales, OwnScales
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.layers.wide_weight_gradients import Both, WideWeightGradients

IN, OUT = 32, 48
FORMS = pytest.mark.parametrize("form", ["e4m3", "hybrid"])
Work = Callable[[], None]


def multiplier(kernels: Kernels = KERNELS, form: Format = "hybrid") -> KernelMultiplier:
    return KernelMultiplier(kernels, torch.float32, form, OwnScales(kernels))


def narrow_products(
    form: Format = "hybrid", *, keeps_input: bool = False
) -> EightBitProducts[Quantised]:
    return EightBitProducts(multiplier(form=form), keeps_input=keeps_input)


def layer_of(
    products: EightBitProducts[Quantised] | EightBitProducts[Both],
    *,
    bias: bool = True,
    device: torch.device = CPU,
) -> Linear:
    return linear((IN, OUT), products, bias=bias, device=device)


def microbatch(seed: int, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, grad = (
        torch.randn(2, 8, IN, generator=generator).to(device),
        torch.randn(2, 8, OUT, generator=generator).to(device),
    )
    return x.requires_grad_(), grad * 1e-6  # gradients are small, and must not vanish


def run(layer: Linear, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The output and the gradient of the input."""
    return forward_backward(layer, microbatch(seed, layer.weight.device))


@pytest.mark.parametrize("again", [False, True], ids=["8 bits kept", "input kept"])
@pytest.mark.parametrize("split", [False, True], ids=["B", "B and W"])
@FORMS
def test_products_are_of_rounded_factors(form: Format, split: bool, again: bool) -> None:
    layer = layer_of(narrow_products(form, keeps_input=again))
    later: list[Work] = []
    defer_weight_gradients(layer, later.append if split else None)
    w = E4M3.seen(layer.weight.detach())
    expected = torch.zeros(OUT, IN, dtype=torch.float64)
    for seed in range(2):
        y, x_grad = run(layer, seed)
        x, grad = microbatch(seed)
        seen, seen_grad = E4M3.seen(x.detach()), GRADIENTS[form].seen(grad)
        torch.testing.assert_close(
            y.double(), seen @ w.T + layer.bias.double(), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(x_grad.double(), seen_grad @ w, rtol=1e-5, atol=1e-11)
        expected += seen_grad.flatten(0, 1).T @ seen.flatten(0, 1)
    assert len(later) == 2 * split
    while later:
        later.pop(0)()
    torch.testing.assert_close(main_grad_of(layer.weight).double(), expected, rtol=1e-5, atol=1e-11)
    exact = torch.zeros(OUT, IN)
    for x, grad in map(microbatch, range(2)):
        exact += grad.flatten(0, 1).T @ x.detach().flatten(0, 1)
    assert not torch.allclose(main_grad_of(layer.weight), exact, rtol=1e-3), "it is rounded"


def test_weight_gradients_may_stay_wide() -> None:
    layer = layer_of(EightBitProducts(WideWeightGradients(multiplier(), PlainProducts(KERNELS))))
    y, x_grad = run(layer)
    x, grad = microbatch(0)
    exact = grad.flatten(0, 1).T @ x.detach().flatten(0, 1)
    torch.testing.assert_close(main_grad_of(layer.weight), exact)
    w = E4M3.seen(layer.weight.detach())
    torch.testing.assert_close(x_grad.double(), GRADIENTS["hybrid"].seen(grad) @ w)
    assert not torch.allclose(y, torch.nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-3)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("split", [False, True], ids=["B", "B and W"])
def test_the_kernels_of_a_gpu_do_the_same(split: bool) -> None:
    """On a GPU, or else in Triton's interpreter, with cuBLAS's demands on what is multiplied."""
    device = torch.device("cuda") if torch.cuda.is_available() else CPU
    found: list[list[Tensor]] = []
    for own, where in ((KERNELS, CPU), (of_a_gpu(device, torch.float32), device)):
        layer = layer_of(EightBitProducts(multiplier(own)), device=where)
        later = list[Work]()
        defer_weight_gradients(layer, later.append if split else None)
        values = [value for seed in range(2) for value in run(layer, seed)]
        while later:
            later.pop(0)()
        found.append([*values, main_grad_of(layer.weight)])
    within = 1e-6 if device == CPU else 1e-3  # tensor cores add with fewer bits than fp32 has
    for theirs, ours in zip(*found, strict=True):
        assert float((ours.cpu() - theirs).norm() / theirs.norm()) < within


@pytest.mark.parametrize("split", [False, True], ids=["B", "B and W"])
def test_what_is_kept_has_8_bits(split: bool) -> None:
    layer, kept = layer_of(narrow_products(), bias=False), list[Tensor]()
    later: list[Work] = []
    defer_weight_gradients(layer, later.append if split else None)
    x, grad = microbatch(0)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    assert sum(t.numel() * t.element_size() for t in kept) == x.numel() + 4
    y.backward(grad)
    factors = [t for work in later for cell in _cells(work) for t in cell]
    assert sum(t.numel() * t.element_size() for t in factors) == split * (
        x.numel() + grad.numel() + 8
    )


def _cells(work: Work) -> list[tuple[Tensor, ...]]:
    """What a deferred product keeps of its two factors."""
    assert isinstance(work, _WeightGradient)
    return [work._grad, work._x]


class Counting(ReferenceKernels):
    """Kernels that count what they quantise, by its number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def quantise(
        self,
        x_rk: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        *,
        straight: bool,
        turned: bool,
        seen: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        self.rows.append(len(x_rk))
        return super().quantise(x_rk, scale, dtype, straight=straight, turned=turned, seen=seen)


def test_a_weight_is_quantised_once_an_iteration_and_all_else_once_a_pass() -> None:
    kernels = Counting()
    products = EightBitProducts(multiplier(kernels))
    layer = layer_of(products)
    for iteration in range(2):
        products.begin()
        for seed in range(3):
            run(layer, seed)
        assert kernels.rows.count(OUT) == iteration + 1
    assert kernels.rows.count(16) == 2 * 3 * 2, "an input and a gradient of every microbatch"


def test_an_updated_weight_is_used_from_the_next_iteration_on() -> None:
    products = narrow_products()
    layer = layer_of(products, bias=False)
    products.begin()
    before, _ = run(layer)
    with torch.no_grad():
        layer.weight.mul_(2)
    products.begin()
    torch.testing.assert_close(run(layer)[0], 2 * before)


@pytest.mark.parametrize("where", ["x", "gradient"])
@pytest.mark.parametrize("fault", [torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_what_is_not_finite_shows(recipe: str, fault: float, where: str) -> None:
    delayed = DelayedScales(
        ("layer",),
        {0: torch.float8_e4m3fn, 1: torch.float8_e4m3fn, 2: torch.float8_e5m2},
        KERNELS,
        CPU,
    )
    scaling = OwnScales(KERNELS) if recipe == "tensorwise" else delayed.of_layer("layer")
    products = EightBitProducts(KernelMultiplier(KERNELS, torch.float32, "hybrid", scaling))
    layer = layer_of(products)
    delayed.begin(records=True)
    run(layer)
    delayed.end(lambda largest: None)
    delayed.begin(records=True)
    x, grad = microbatch(0)
    with torch.no_grad():
        (x if where == "x" else grad)[0, 0, 0] = fault
    y = layer(x)
    y.backward(grad)
    assert not main_grad_of(layer.weight).isfinite().all()
    if where == "x":
        assert not y.isfinite().all()
    scales = delayed.tensors()["layer"][:, -1].clone()
    delayed.end(lambda largest: None)
    assert bool(delayed.tensors()["layer"].isfinite().all()), "it tells nothing of the next one"
    if recipe == "delayed":
        faulty = 0 if where == "x" else 2
        assert delayed.tensors()["layer"][faulty, -1] == scales[faulty]


def test_cublas_can_read_the_worth_of_every_layer() -> None:
    """From a multiple of 16 bytes; without, a product is refused on a GPU."""
    names = ("a", "b", "c")
    delayed = DelayedScales(names, types_of("hybrid"), KERNELS, CPU)
    delayed.begin(records=True)
    for number, name in enumerate(names):
        for role in (INPUT, WEIGHT, GRADIENT):
            largest = delayed.seen(number, role)
            assert largest is not None
            largest.fill_(2.0 + number)
        assert delayed.of_layer(name).known(INPUT) is None
    delayed.end(lambda largest: None)
    for number, name in enumerate(names):
        for role in (INPUT, WEIGHT, GRADIENT):
            found = delayed.of_layer(name).known(role)
            assert found is not None
            assert found.worth.data_ptr() % 16 == 0
            assert found.worth.item() == pytest.approx(1 / found.scale.item(), rel=1e-6)
            most = torch.finfo(types_of("hybrid")[role]).max
            assert found.scale.item() == pytest.approx(most / (2.0 + number), rel=1e-6)


def test_a_tensor_of_zeros_has_a_finite_scale() -> None:
    products = narrow_products()
    layer = layer_of(products, bias=False)
    x = torch.zeros(16, IN, requires_grad=True)
    y = layer(x)
    y.backward(torch.zeros_like(y))
    assert not y.any()
    assert x.grad is not None
    assert not x.grad.any()
    assert not main_grad_of(layer.weight).any()


class Stale(EightBitProducts[Quantised]):
    """Products that never notice another weight."""

    def begin(self) -> None:
        """Do nothing."""


class ScaledTwice(ReferenceKernels):
    """Kernels that take numbers for worth what they are worth, twice."""

    def eight_bit_product(
        self,
        left: EightBits,
        right: EightBits,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        *,
        quick: bool = False,
    ) -> Tensor:
        return super().eight_bit_product(left, right, dtype, bias, quick=quick) * left.worth


def outputs_are_right(products: EightBitProducts[Quantised]) -> bool:
    """Whether outputs are those of rounded factors, before and after an update."""
    layer = layer_of(products, bias=False)
    right = True
    for _ in range(2):
        products.begin()
        y, _ = run(layer)
        expected = E4M3.seen(microbatch(0)[0].detach()) @ E4M3.seen(layer.weight.detach()).T
        right = right and torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            layer.weight.mul_(1.1).add_(0.01)
    return right


def test_faults_on_purpose_are_found() -> None:
    assert outputs_are_right(narrow_products())
    assert not outputs_are_right(Stale(multiplier()))
    assert not outputs_are_right(EightBitProducts(multiplier(ScaledTwice())))
