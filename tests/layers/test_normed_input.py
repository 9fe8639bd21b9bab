"""A norm that Transformer Engine rounds as it is formed, and the linear layer behind it.

By arithmetic alone: the norm by plain PyTorch in float64, rounded by exponents. The package is not
here. In its place is one with its signatures (``kernels.engine_stand_in``).
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from harness.marks import full
from kernels.engine_stand_in import installed
from layers.narrow_linear import CPU, KERNELS
from layers.narrow_linear import linear as narrow_linear
from reference.plain_eight_bits import E4M3, E5M2, Kind, Rounding
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.kernels.cuda.transformer_engine import CUDNN_NORMS, load_transformer_engine
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.eight_bit_settings import types_of
from megatron.layers.eight_bits import EightBitProducts
from megatron.layers.engine_multiplier import EngineMultiplier, Rounded
from megatron.layers.linear import FactoredInput
from megatron.layers.main_grad import main_grad_of
from megatron.layers.norm import LayerNorm, NormKind, RMSNorm, build_norm
from megatron.layers.normed_input import read_norm
from megatron.layers.products import PlainProducts, Products
from megatron.layers.scales import DelayedScales
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.layers.wide_weight_gradients import WideWeightGradients
from megatron.parallel.lanes import Done
from megatron.parallel.tensor import TensorParallel

TOKENS, HIDDEN, OUT, EPSILON = 128, 256, 96, 0.1
SPLIT = pytest.mark.parametrize("split", [False, True], ids=["B", "B and W"])
Recipe = Literal["delayed", "mxfp8"]
Work = Callable[[], None]


@pytest.fixture(autouse=True)
def package() -> Iterator[None]:
    """The package is there, and its GPU is a Hopper."""
    with installed():
        yield


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm_of(kind: NormKind, *, zero_centred: bool) -> LayerNorm | RMSNorm:
    norm = build_norm(kind, HIDDEN, EPSILON, torch.float32, CPU, KERNELS, zero_centred=zero_centred)
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.add_(0.3 * drawn(HIDDEN, seed=70 + seed))
    return norm


class Reader:
    """A linear layer that reads norms, the norm before it, and two iterations of scales.

    The first iteration knows no scales. Its tensors are ten times those of the second, of which
    none is cut off.
    """

    def __init__(self, recipe: Recipe, norm: LayerNorm | RMSNorm, *, split: bool) -> None:
        self.norm = norm
        scaling, self.scales = None, None
        if recipe == "delayed":
            self.scales = DelayedScales(("layer",), types_of("hybrid"), KERNELS, CPU)
            scaling = self.scales.of_layer("layer")
        self.products = EightBitProducts(
            EngineMultiplier(
                load_transformer_engine(), torch.float32, "hybrid", recipe, CPU, scaling
            )
        )
        self.layer = narrow_linear((HIDDEN, OUT), self.products)
        self.later: list[Work] = []
        defer_weight_gradients(self.layer, self.later.append if split else None)
        if self.scales is not None:
            self.scales.begin(records=True)
            with torch.no_grad():
                self.layer(*read_norm(self.layer, norm, drawn(2, 64, HIDDEN, seed=90), None)[1:])
                self.products.of_gradient(drawn(TOKENS, OUT, seed=91) * 1e-5, TensorParallel())
            self.scales.end(lambda largest: None)
            self.scales.begin(records=True)

    def seen(self, role: int, kind: Kind, x: Tensor) -> Tensor:
        """What a product makes of a tensor, of which no more than its history is known."""
        assert self.scales is not None
        scale = float(self.scales.tensors()["layer"][role, -1])
        return kind.rounded(x * scale) / scale


def microbatch(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stream, what joins it, and the gradients of the layer's output and of the stream."""
    x, part, stream_grad = (drawn(2, 64, HIDDEN, seed=10 * seed + n) for n in range(3))
    return x, part, drawn(2, 64, OUT, seed=10 * seed + 3) * 1e-6, stream_grad * 1e-6


def close(found: Tensor | None, expected: Tensor, within: float = 1e-6) -> None:
    assert found is not None
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < within, error


CASES = pytest.mark.parametrize(
    ("recipe", "kind", "zero_centred"),
    [
        ("delayed", "RMSNorm", True),
        ("delayed", "LayerNorm", False),
        ("mxfp8", "RMSNorm", False),
        full("mxfp8", "LayerNorm", True),
        full("delayed", "LayerNorm", True),
    ],
)


@CASES
@SPLIT
@pytest.mark.parametrize("hopper", [True, False], ids=["Hopper", "Blackwell"])
def test_products_are_of_the_rounded_norm(
    recipe: Recipe,
    kind: NormKind,
    zero_centred: bool,
    split: bool,
    hopper: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two microbatches: output, and gradients of stream, branch, norm and weights."""
    if recipe == "mxfp8":
        monkeypatch.setenv(CUDNN_NORMS, "1")
    with installed(hopper=hopper):
        norm = norm_of(kind, zero_centred=zero_centred)
        reader = Reader(recipe, norm, split=split)
        rounding = Rounding(recipe, E5M2)
        weight = reader.layer.weight.detach()
        products, w_grad = [], torch.zeros(OUT, HIDDEN, dtype=torch.float64)
        parameters = [p.detach().double().requires_grad_() for p in norm.parameters()]
        for seed in range(2):
            x, part, grad, stream_grad = microbatch(seed)
            x.requires_grad_()
            part.requires_grad_()
            stream, factored = read_norm(reader.layer, norm, x, part)
            assert isinstance(factored, FactoredInput)
            memory = factored.placeholder.untyped_storage()
            assert memory.nbytes() == 4, "the norm itself is nowhere"
            y = reader.layer(factored)
            torch.autograd.backward([stream, y], [stream_grad, grad])
            total = (x + part).detach().double().requires_grad_()
            exact = formula(kind, total, *parameters, zero_centred=zero_centred)
            narrow, rows = exact.detach().flatten(0, 1), grad.flatten(0, 1)
            if recipe == "delayed":
                both = [reader.seen(0, E4M3, narrow)] * 2
                w = [reader.seen(1, E4M3, weight)] * 2
                g = [reader.seen(2, E5M2, rows)] * 2
            else:
                both = [rounding.rows(E4M3, narrow), rounding.columns(E4M3, narrow)]
                w = [rounding.rows(E4M3, weight), rounding.columns(E4M3, weight)]
                g = [rounding.rows(E5M2, rows), rounding.columns(E5M2, rows)]
            assert torch.equal(stream, (x + part))
            products.append((y.flatten(0, 1), both[0] @ w[0].T + reader.layer.bias.detach()))
            exact.backward((g[0] @ w[1]).view_as(exact))
            assert total.grad is not None
            close(x.grad, total.grad + stream_grad)
            close(part.grad, total.grad + stream_grad)
            w_grad += g[1].T @ both[1]
        for found, expected in products:
            # of 32 thousand numbers, fp32 rounds a few to the other side
            close(found.detach(), expected, within=1e-4)
        for own, exact in zip(norm.parameters(), parameters, strict=True):
            assert exact.grad is not None
            close(own.grad, exact.grad)
        assert len(reader.later) == 2 * split
        while reader.later:
            reader.later.pop(0)()
    close(main_grad_of(reader.layer.weight), w_grad, within=1e-4)


def formula(
    kind: NormKind, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, zero_centred: bool
) -> Tensor:
    """The norm as the textbooks have it."""
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    scale = 1 + weight if zero_centred else weight
    normed = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * scale
    return normed if bias is None else normed + bias


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_delayed_scales_follow_the_norms_of_all_microbatches(kind: NormKind) -> None:
    norm = norm_of(kind, zero_centred=False)
    reader = Reader("delayed", norm, split=False)
    assert reader.scales is not None
    largest = 0.0
    for seed in (4, 3, 5):
        x, *_ = microbatch(seed)
        with torch.no_grad():
            reader.layer(read_norm(reader.layer, norm, x, None)[1])
            largest = max(largest, float(norm(x).abs().max()))
    reader.scales.end(lambda largest: None)
    scale = float(reader.scales.tensors()["layer"][0, -1])
    assert scale == pytest.approx(E4M3.most / largest, rel=1e-6)
    reader.scales.begin(records=False)  # an evaluation, which leaves no trace
    with torch.no_grad():
        reader.layer(read_norm(reader.layer, norm, 100 * microbatch(6)[0] ** 3, None)[1])
    reader.scales.begin(records=True)
    reader.scales.end(lambda largest: None)
    assert float(reader.scales.tensors()["layer"][0, -1]) == scale


@SPLIT
def test_what_is_kept_are_the_stream_and_columns_in_8_bits(split: bool) -> None:
    reader = Reader("delayed", norm := norm_of("LayerNorm", zero_centred=False), split=split)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x, _, grad, _ = microbatch(0)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = reader.layer(read_norm(reader.layer, norm, x.requires_grad_(), None)[1])
    large = {t.dtype: t for t in kept if t.numel() >= x.numel()}
    assert large[torch.float32].data_ptr() == x.data_ptr()
    assert large[torch.uint8].shape == (HIDDEN, TOKENS)
    rest = [t for t in kept if t.numel() < x.numel()]
    assert sum(t.numel() for t in rest) == HIDDEN + 2 * TOKENS + 1, "scale, statistics, a worth"
    assert len(large) + len(rest) == len(kept)
    y.backward(grad)


class SharesOutputs(TensorParallel):
    """Two ranks with all tokens, whose parts of the weight are the same."""

    size = 2

    def start_reduction(self, partial_bsh: Tensor) -> Done[Tensor]:
        return Done(2 * partial_bsh)


def test_the_norm_has_the_gradients_of_all_ranks_that_share_its_reader() -> None:
    found = []
    for columns in (TensorParallel(), SharesOutputs()):
        norm = norm_of("LayerNorm", zero_centred=False)
        reader, (x, _, grad, stream_grad) = Reader("delayed", norm, split=False), microbatch(0)
        reader.layer.columns = columns
        stream, placeholder = read_norm(reader.layer, norm, x.requires_grad_(), None)
        y = reader.layer(placeholder)
        torch.autograd.backward([stream, y], [0 * stream_grad, grad])
        found.append([parameter.grad for parameter in (x, *norm.parameters())])
    for alone, shared in zip(*found, strict=True):
        assert alone is not None
        close(shared, 2 * alone.double())


class SharesTokens(TensorParallel):
    """Two ranks with their own tokens."""

    size, sequence_parts = 2, 2


def multiplier(recipe: Any) -> EngineMultiplier:
    scaling = None
    if recipe == "delayed":
        scales = DelayedScales(("layer",), types_of("hybrid"), KERNELS, CPU)
        scaling = scales.of_layer("layer")
        scales.end(lambda largest: None)
    engine = load_transformer_engine()
    return EngineMultiplier(engine, torch.float32, "hybrid", recipe, CPU, scaling)


def made_of(recipe: Any, *, keeps_input: bool = False) -> EightBitProducts[Rounded]:
    return EightBitProducts(multiplier(recipe), keeps_input=keeps_input)


@pytest.mark.parametrize(
    ("recipe", "by_cudnn", "rows", "fused"),
    [
        ("delayed", "", 100, True),
        ("delayed", "0", 128, True),
        ("delayed", "1", 128, False),
        ("mxfp8", "", 128, False),
        ("mxfp8", "1", 128, True),
        ("mxfp8", "1", 96, False),
        ("tensorwise", "", 128, False),
        ("tensorwise", "1", 128, False),
        ("blockwise", "1", 128, False),
    ],
)
def test_only_what_takes_one_pass_is_left_to_the_package(
    recipe: str, by_cudnn: str, rows: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CUDNN_NORMS, by_cudnn)
    x = torch.empty(1, rows, HIDDEN)
    assert (made_of(recipe).of_norm(x, TensorParallel()) is not None) == fused


def test_a_norm_that_is_needed_as_it_is_comes_first() -> None:
    x, made = torch.empty(2, 64, HIDDEN), made_of("delayed")
    assert made.of_norm(x, TensorParallel()) is not None
    assert made.of_norm(x, SharesTokens()) is None
    assert made.of_norm(x.double(), TensorParallel()) is None, "a stream in another type"
    assert made_of("delayed", keeps_input=True).of_norm(x, TensorParallel()) is None
    plain = PlainProducts(KERNELS)
    others: tuple[Products[Any], ...] = (
        plain,
        EightBitProducts(WideWeightGradients(multiplier("delayed"), plain)),
    )
    assert [each.of_norm(x, TensorParallel()) for each in others] == [None, None]


class ShortRows(ReferenceKernels):
    """Form gradients of norms of less than a row here."""

    longest_norm = HIDDEN - 1


def test_a_norm_comes_first_where_its_gradients_would_be_slow() -> None:
    norm = build_norm("RMSNorm", HIDDEN, EPSILON, torch.float32, CPU, ShortRows())
    reader, x = Reader("delayed", norm, split=False), microbatch(0)[0]
    _, normed = read_norm(reader.layer, norm, x, None)
    assert isinstance(normed, Tensor)
    assert torch.equal(normed, norm(x))


def test_the_first_iteration_knows_no_scale_and_reads_the_norm() -> None:
    norm = norm_of("RMSNorm", zero_centred=False)
    scales = DelayedScales(("layer",), types_of("hybrid"), KERNELS, CPU)
    engine = load_transformer_engine()
    products = EightBitProducts(
        EngineMultiplier(engine, torch.float32, "hybrid", "delayed", CPU, scales.of_layer("layer"))
    )
    x, part, *_ = microbatch(0)
    stream, normed = read_norm(narrow_linear((HIDDEN, OUT), products), norm, x, part)
    assert torch.equal(stream, x + part)
    assert isinstance(normed, Tensor)
    assert torch.equal(normed, norm(x + part))


def test_a_factor_is_read_by_no_other_layer() -> None:
    norm = norm_of("RMSNorm", zero_centred=False)
    reader, other = (Reader("delayed", norm, split=False) for _ in range(2))
    _, factored = read_norm(reader.layer, norm, microbatch(0)[0], None)
    with pytest.raises(AssertionError, match="a factor of another layer"):
        other.layer(factored)
