"""Linear layers in 8 bits: their three products with all roundings, beside those of bf16.

Products with scales of blocks, and on Blackwell those with a scale for every 32 numbers (MXFP8),
are beside those with one scale for a tensor. Where Transformer
Engine is installed, its products too, and its norms that are rounded as they are formed, beside
norms that are rounded afterwards.

Shapes: n tokens, h input features, o = 4h output features.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from megatron.kernels.choose import kernels_for
from megatron.kernels.cuda.microscaling import lack_of_mx_products
from megatron.kernels.cuda.transformer_engine import (
    CUDNN_NORMS,
    TransformerEngine,
    load_transformer_engine,
)
from megatron.kernels.eight_bits import E4M3, E5M2, EightBits, largest_number
from megatron.kernels.face import Kernels
from megatron.layers.block_multiplier import BlockMultiplier
from megatron.layers.eight_bit_settings import Recipe, types_of
from megatron.layers.eight_bits import Multiplier
from megatron.layers.engine_multiplier import EngineMultiplier
from megatron.layers.mx_multiplier import MicroscalingMultiplier
from megatron.layers.scales import GRADIENT, INPUT, WEIGHT, DelayedScales
from megatron.run.eight_bits import LEAST_CAPABILITY
from tools.gpu_sections.timing import Scale, Section, laps, table

TOKENS: Final = (4096, 8192)
EPSILON: Final = 1e-5
WITH_NORMS: Final[tuple[Recipe, ...]] = ("delayed", "mxfp8")
"""Recipes by which norms may be rounded as they are formed."""


def measure(scale: Scale) -> Section:
    """Time the products of a layer, and measure the errors of the products in 8 bits."""
    if scale.device.type == "cuda":
        capability = torch.cuda.get_device_capability(scale.device)
        if capability < LEAST_CAPABILITY:
            return Section([f"Tensor cores of compute capability {capability} know no 8 bits."])
    kernels, values = kernels_for(scale.device, torch.bfloat16), {}
    rows: list[tuple[str, object]] = []
    engine, by_package, said_of_it = _by_transformer_engine(scale)
    ways, said_of_them = _by_kernels(scale, kernels)
    ways |= {f"by Transformer Engine, {recipe}": make for recipe, make in by_package.items()}
    for n in (64,) if scale.small else TOKENS:
        h = 64 if scale.small else 4096
        own, errors = _products(scale, kernels, n, h)
        for way, make in ways.items():
            found, off = _products_of(scale, way, make(), n, h)
            own, errors = own | found, errors | off
        for recipe in WITH_NORMS:
            if engine and not engine.why_not(recipe) and engine.rounds_norms(recipe, n, h):
                found, off = _norms(scale, kernels, engine, recipe, n, h)
                own, errors = own | found, errors | off
        values[str(n)] = {**own, "errors": errors}
        rows += [(f"{name}, n = {n}", 1e6 * seconds) for name, seconds in own.items()]
        rows += [(f"{name} against float64, n = {n}", f"{off:.2%}") for name, off in errors.items()]
    said = "h = 4096, o = 4h; a quantised factor is written in both layouts."
    lines = [said, *said_of_them, *said_of_it, "", *table(("work", "us or error"), rows)]
    return Section(lines, values)


def _products(
    scale: Scale, kernels: Kernels, n: int, h: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each operation, and the relative errors of the products."""
    x, weight, grad = scale.drawn(n, h), scale.drawn(4 * h, h), scale.drawn(n, 4 * h)
    total = torch.zeros(4 * h, h, device=scale.device)
    (x8, xt), (w8, wt) = _quantised(kernels, x, E4M3), _quantised(kernels, weight, E4M3)
    g8, gt = _quantised(kernels, grad, E5M2)
    one = torch.ones((), device=scale.device)
    seen = torch.zeros((), device=scale.device)

    def quantise(tensor: Tensor) -> Callable[[], object]:
        return lambda: kernels.quantise(tensor, one, E4M3, straight=True, turned=True, seen=seen)

    bf16 = torch.bfloat16
    works: dict[str, Callable[[], object]] = {
        "quantise x, its scale known": quantise(x),
        "quantise the gradient, its scale known": quantise(grad),
        "find the scale of x": lambda: kernels.largest(x),
        "x W in 8 bits": lambda: kernels.eight_bit_product(x8, w8, bf16, quick=True),
        "x W in bf16": lambda: x @ weight.T,
        "G W in 8 bits": lambda: kernels.eight_bit_product(g8, wt, bf16),
        "G W in bf16": lambda: grad @ weight,
        "G x in 8 bits, added": lambda: kernels.accumulate_eight_bit_product_(total, gt, xt, bf16),
        "G x in bf16, added": lambda: kernels.accumulate_product_(total, grad.T, x),
    }
    seconds = dict(zip(works, laps(scale, list(works.values())), strict=True))
    errors = {
        "x W": _error(kernels.eight_bit_product(x8, w8, bf16, quick=True), x, weight.T),
        "G W": _error(kernels.eight_bit_product(g8, wt, bf16), grad, weight),
        "G x": _error(kernels.eight_bit_product(gt, xt, torch.float32), grad.T, x),
    }
    return seconds, errors


def _by_kernels(
    scale: Scale, kernels: Kernels
) -> tuple[dict[str, Callable[[], Multiplier[Any]]], list[str]]:
    """Return the kernels' products with many scales, and the reason why some are missing."""
    found: dict[str, Callable[[], Multiplier[Any]]] = {
        "in blocks": partial(BlockMultiplier, kernels, torch.bfloat16, "hybrid")
    }
    lack = lack_of_mx_products(scale.device) if scale.device.type == "cuda" else None
    if lack is not None:
        return found, ["", f"Skipped: products in MXFP8, because {lack}."]
    found["in MXFP8"] = partial(MicroscalingMultiplier, kernels, torch.bfloat16, "hybrid")
    return found, []


def _by_transformer_engine(
    scale: Scale,
) -> tuple[TransformerEngine | None, dict[Recipe, Callable[[], EngineMultiplier]], list[str]]:
    """Return the package, its products by recipe, and the reasons why other recipes are missing."""
    try:
        engine = load_transformer_engine()
    except ValueError as error:
        return None, {}, ["", f"Transformer Engine: {error}."]
    found: dict[Recipe, Callable[[], EngineMultiplier]] = {}
    said = ["", f"Transformer Engine {engine.version}."]
    recipes: tuple[Recipe, ...] = "tensorwise", "blockwise", "mxfp8"
    for recipe in recipes:
        if lack := engine.why_not(recipe):
            said.append(f"Not {recipe}: {lack}")
        else:
            found[recipe] = partial(
                EngineMultiplier, engine, torch.bfloat16, "hybrid", recipe, scale.device
            )
    if not engine.has_cudnn_norms:
        said.append(f"Norms with mxfp8 are rounded as they are formed with {CUDNN_NORMS}=1 only.")
    return engine, found, said


def _products_of(
    scale: Scale, way: str, multiplier: Multiplier[Any], n: int, h: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds and errors of a multiplier's products, in the form of ``_products``."""
    x, weight, grad = scale.drawn(n, h), scale.drawn(4 * h, h), scale.drawn(n, 4 * h)
    total = torch.zeros(4 * h, h, device=scale.device)
    x8, g8 = (multiplier.factor(r, t, "both") for r, t in ((INPUT, x), (GRADIENT, grad)))
    w8 = multiplier.weight(weight)
    works: dict[str, Callable[[], object]] = {
        "quantise x": lambda: multiplier.factor(INPUT, x, "both"),
        "quantise the gradient": lambda: multiplier.factor(GRADIENT, grad, "both"),
        "x W": lambda: multiplier.output(x8, w8, None),
        "G W": lambda: multiplier.input_gradient(g8, w8),
        "G x, added": lambda: multiplier.accumulate_(total, g8, x8, begins=False),
    }
    seconds = dict(zip(works, laps(scale, list(works.values())), strict=True))
    multiplier.accumulate_(total, g8, x8, begins=True)
    errors = {
        "x W": _error(multiplier.output(x8, w8, None), x, weight.T),
        "G W": _error(multiplier.input_gradient(g8, w8), grad, weight),
        "G x": _error(total, grad.T, x),
    }
    return (
        {f"{name} {way}": found for name, found in seconds.items()},
        {f"{name} {way},": found for name, found in errors.items()},
    )


def _norms(
    scale: Scale, kernels: Kernels, engine: TransformerEngine, recipe: Recipe, n: int, h: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds of norms, and errors of their products, in the form of ``_products``."""

    def then_rounded(write: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: multiplier.factor(INPUT, write(), "both")

    x, weight = scale.drawn(n, h), scale.drawn(4 * h, h)
    scale_h, bias_h = scale.drawn(h), scale.drawn(h)
    written: dict[str, tuple[Tensor | None, Callable[[], Tensor]]] = {
        "RMSNorm": (None, partial(kernels.rms_norm, x, scale_h, EPSILON)),
        "LayerNorm": (bias_h, partial(kernels.layer_norm, x, scale_h, bias_h, EPSILON)),
    }
    multiplier = _knowing_scales(
        scale, kernels, engine, recipe, (written["LayerNorm"][1](), weight)
    )
    form, name = multiplier.norm(x), f"by Transformer Engine, {recipe}"
    assert form is not None
    w8 = multiplier.weight(weight)
    seconds, errors = dict[str, float](), dict[str, float]()
    for kind, (bias, write) in written.items():
        at_once = partial(form, x, scale_h, bias, EPSILON)
        both = laps(scale, [then_rounded(write), at_once])
        seconds[f"{kind}, then rounded {name}"], seconds[f"{kind} in 8 bits {name}"] = both
        product = multiplier.output(at_once().factor, w8, None)
        errors[f"{kind} W {name},"] = _error(product, write(), weight.T)
    return seconds, errors


def _knowing_scales(
    scale: Scale,
    kernels: Kernels,
    engine: TransformerEngine,
    recipe: Recipe,
    seen: tuple[Tensor, Tensor],
) -> EngineMultiplier:
    """Return a multiplier with scales that an earlier iteration has left."""
    scales = DelayedScales(("layer",), types_of("hybrid"), kernels, scale.device)
    scaling = scales.of_layer("layer") if recipe == "delayed" else None
    multiplier = EngineMultiplier(engine, torch.bfloat16, "hybrid", recipe, scale.device, scaling)
    scales.begin(records=True)
    for role, tensor in zip((INPUT, WEIGHT), seen, strict=True):
        multiplier.factor(role, tensor, "both")
    scales.end(lambda largest: None)
    scales.begin(records=True)
    return multiplier


def _quantised(kernels: Kernels, x: Tensor, dtype: torch.dtype) -> tuple[EightBits, EightBits]:
    """Return a matrix in 8 bits, straight and turned."""
    amax = kernels.largest(x)
    most = largest_number(dtype)
    straight, turned = kernels.quantise(x, most / amax, dtype, straight=True, turned=True)
    assert straight is not None
    assert turned is not None
    return EightBits(straight, amax / most), EightBits(turned, amax / most)


def _error(found: Tensor, left: Tensor, right: Tensor) -> float:
    """Return the error of some rows of a product, relative to them."""
    exact = left[:64].double() @ right.double()
    return float((found[:64].double() - exact).norm() / exact.norm())
