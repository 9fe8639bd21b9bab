"""Products in 8 bits by functions of the package Transformer Engine.

The package's modules are not used: they own their weights, and form weight gradients first in,
first out. The parts below its modules fit every schedule: *quantisers*, which round a tensor by
rows, by columns or by both, and one function for products. That function can add to an earlier sum,
also in 8 bits, and takes scales of blocks. The package's norms round their results in the same
pass. The package is optional: a flag asks for it, and a missing part is reported at the start.

Shapes: n rows, k columns of a factor.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from megatron.native.packages import fault_of_names

Layout = Literal["TN", "NN", "NT"]
"""The products ``right left^T``, ``right left`` and ``right^T left``. BLAS, whose matrices lie in
memory by columns, gave the names."""

Bits: TypeAlias = Any
"""A factor in the package's class: a tensor rounded by rows, by columns or by both, with scales."""

OLDEST: Final = (2, 10)
"""First version whose product brings its own workspace. The functions used are the same up to
2.20."""
NEXT_MAJOR: Final = 3

USED: Final = {
    "general_gemm": "A B out_dtype layout out bias accumulate use_split_accumulator grad",
    "Float8Quantizer": "scale amax fp8_dtype",
    "Float8CurrentScalingQuantizer": "fp8_dtype device rowwise columnwise",
    "Float8BlockQuantizer": "fp8_dtype rowwise columnwise block_scaling_dim",
    "MXFP8Quantizer": "fp8_dtype rowwise columnwise",
}
"""The functions and classes that are called, with the names of the arguments that each gets."""

NORMS: Final = {
    "layernorm_fwd": "input weight bias eps ln_out quantizer otype sm_margin zero_centered_gamma",
    "rmsnorm_fwd": "input weight eps ln_out quantizer otype sm_margin zero_centered_gamma",
}
"""The norms, in the same form. They are called only if both exist with these arguments."""

_HOMES: Final = {
    "general_gemm": "transformer_engine.pytorch.cpp_extensions",
    "layernorm_fwd": "transformer_engine_torch",
    "rmsnorm_fwd": "transformer_engine_torch",
}
"""The modules of those functions that ``transformer_engine.pytorch`` itself lacks."""

CUDNN_NORMS: Final = "NVTE_NORM_FWD_USE_CUDNN"
"""The package's environment variable that lets cuDNN form norms."""

TILE: Final = 128
"""cuDNN forms and rounds a norm with scales of blocks only if rows and columns are multiples of
this."""

_AVAILABLE: Final = {
    "tensorwise": "is_fp8_available",
    "delayed": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""The package's functions that say whether a GPU supports a recipe, a way to choose scales."""


@dataclass(frozen=True)
class TransformerEngine:
    """The parts of the package that are used.

    Attributes:
        version: version of the package.
        module: ``transformer_engine.pytorch``.
        gemm: its function for products.
        layer_norm: its LayerNorm; ``None`` if one of the two norms is missing or lacks an argument.
        rms_norm: its RMSNorm; ``None`` if ``layer_norm`` is.
        types: its names of PyTorch's types.
        has_cudnn_norms: whether cuDNN forms its norms, by the environment variable.
    """

    version: str
    module: Any
    gemm: Callable[..., Any]
    layer_norm: Callable[..., Any] | None
    rms_norm: Callable[..., Any] | None
    types: Mapping[torch.dtype, Any]
    has_cudnn_norms: bool

    def why_not(self, recipe: str) -> str | None:
        """Return the reason why the current GPU cannot use a recipe; ``None`` if it can."""
        there, reason = getattr(self.module, _AVAILABLE[recipe])(return_reason=True)
        return None if there else str(reason)

    def quantiser(
        self, recipe: str, dtype: torch.dtype, device: torch.device, *, is_weight: bool
    ) -> Any:
        """Return a quantiser that rounds tensors by scales made from their own numbers.

        Args:
            recipe: numbers that share a scale: a tensor (``tensorwise``), 128 numbers or 128 x 128
                of a weight (``blockwise``), or 32 numbers (``mxfp8``).
            dtype: type of 8 bits.
            device: device of the tensors.
            is_weight: whether the tensor is a weight, not an input or a gradient.
        """
        kind, both = self.types[dtype], {"rowwise": True, "columnwise": True}
        if recipe == "tensorwise":
            made = self.module.Float8CurrentScalingQuantizer(kind, device=device, **both)
        elif recipe == "mxfp8":
            made = self.module.MXFP8Quantizer(kind, **both)
        else:
            assert recipe == "blockwise", recipe
            made = self.module.Float8BlockQuantizer(
                kind, block_scaling_dim=2 if is_weight else 1, **both
            )
        made.optimize_for_gemm = not is_weight  # lay scales as products want them, from 2.12 on
        return made

    def given_scale(self, dtype: torch.dtype, scale: Tensor, seen: Tensor | None) -> Any:
        """Return a quantiser that rounds tensors by a given scale.

        Args:
            dtype: type of 8 bits.
            scale: fp32 []; numbers are multiplied by it.
            seen: fp32 []; it is raised to the largest magnitude. ``None``: nobody asks for that.
        """
        largest = torch.zeros_like(scale) if seen is None else seen
        return self.module.Float8Quantizer(
            scale=scale.view(1), amax=largest.view(1), fp8_dtype=self.types[dtype]
        )

    def rounds_norms(self, recipe: str, rows: int, columns: int) -> bool:
        """Return whether a norm is rounded in the kernel that forms it.

        The package's own norms do so by a given scale (``delayed``). cuDNN's norms do so by scales
        of 32 numbers (``mxfp8``). With ``delayed``, cuDNN's norms would overwrite the largest
        magnitudes of other norms, so they are not used. In all other cases the package writes the
        norm in 16 bits, and then rounds it.

        Args:
            recipe: way to choose scales.
            rows: number of rows of the norm.
            columns: number of columns of the norm.
        """
        if self.layer_norm is None or self.rms_norm is None:
            return False
        if self.has_cudnn_norms:
            return recipe == "mxfp8" and rows % TILE == columns % TILE == 0
        return recipe == "delayed"

    def norm(
        self,
        x_nk: Tensor,
        weight_k: Tensor,
        bias_k: Tensor | None,
        epsilon: float,
        quantiser: Any,
    ) -> tuple[Bits, Tensor | None, Tensor]:
        """Return a norm in 8 bits by rows and columns, and its rows' means and inverse deviations.

        Args:
            x_nk: activations, dense.
            weight_k: in the type of ``x_nk``.
            bias_k: in the type of ``x_nk``; ``None``: RMSNorm, without means.
            epsilon: as in ``Kernels``.
            quantiser: rounds the norm.
        """
        quantiser.internal = True
        quantiser.set_usage(rowwise=True, columnwise=True)
        values = {"input": x_nk, "weight": weight_k, "eps": epsilon}
        if bias_k is not None:
            values["bias"] = bias_k
        form = self.rms_norm if bias_k is None else self.layer_norm
        assert form is not None, "it rounds no norms"
        bits, mean_n, inverse_n = form(
            **values,
            ln_out=None,
            quantizer=quantiser,
            otype=self.types[x_nk.dtype],
            sm_margin=0,
            zero_centered_gamma=False,
        )
        return bits, mean_n, inverse_n

    def product(
        self,
        left: Bits,
        right: Bits,
        layout: Layout,
        dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        adds: bool = False,
        quick: bool = False,
    ) -> Tensor:
        """Return a product, which is summed up in fp32 and rounded once.

        Args:
            left: factor; rounded by rows if the layout begins with ``T``, by columns if with ``N``.
            right: factor; rounded by rows if the layout ends with ``N``, by columns if with ``T``.
            layout: see ``Layout``.
            dtype: type of the result.
            bias: one number for each column of the result.
            out: contiguous tensor that takes the result; ``None``: a new tensor.
            adds: add the product to the old content of ``out``.
            quick: sums may have fewer bits where that is faster, as in the package's own layers.
        """
        result, *_ = self.gemm(
            left,
            right,
            out_dtype=dtype,
            layout=layout,
            out=out,
            bias=bias,
            accumulate=adds,
            use_split_accumulator=not quick,
            grad=layout != "TN",
        )
        found: Tensor = result
        return found


def rounded(quantiser: Any, x_nk: Tensor, *, rows: bool = True, columns: bool = False) -> Bits:
    """Return a tensor in 8 bits.

    Args:
        quantiser: quantiser from ``TransformerEngine``.
        x_nk: activations, dense.
        rows: round it along k.
        columns: round it along n.
    """
    quantiser.internal = True  # plain objects, which autograd does not see
    quantiser.set_usage(rowwise=rows, columnwise=columns)
    return quantiser(x_nk)


def columns_of(bits: Bits) -> tuple[tuple[Tensor, ...], Callable[[Sequence[Tensor]], Bits]]:
    """Return the tensors that hold a factor's columns, and a function that makes a factor of them.

    Args:
        bits: a factor rounded by columns, perhaps by rows too; it is not changed.
    """
    kind = type(bits)
    part = kind(**bits.get_metadata())
    part.update_usage(rowwise_usage=False, columnwise_usage=True)
    described = part.get_metadata()
    tensors = {name: value for name, value in described.items() if isinstance(value, Tensor)}
    names, rest = tuple(tensors), {n: value for n, value in described.items() if n not in tensors}

    def again(kept: Sequence[Tensor]) -> Bits:
        return kind(**rest, **dict(zip(names, kept, strict=True)))

    return tuple(tensors.values()), again


def load_transformer_engine() -> TransformerEngine:
    """Return the package.

    Raises:
        ValueError: it is not installed, does not load, is of another version, or lacks something.
    """
    name = "transformer_engine.pytorch"
    try:
        module = import_module(name)
        homes = {home: import_module(home) for home in _HOMES.values()}
        types = import_module(f"{name}.constants").TE_DType
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ValueError(f"it does not load here ({error})") from error
    version = known_version()
    called: dict[str, Any] = {
        name: getattr(homes[_HOMES[name]] if name in _HOMES else module, name, None)
        for name in (*USED, *NORMS)
    }
    if fault := fault_of_names(USED, called):
        raise ValueError(fault)
    if fault_of_names(NORMS, called):
        called |= dict.fromkeys(NORMS)
    return TransformerEngine(
        version=version,
        module=module,
        gemm=called["general_gemm"],
        layer_norm=called["layernorm_fwd"],
        rms_norm=called["rmsnorm_fwd"],
        types=types,
        has_cudnn_norms=os.environ.get(CUDNN_NORMS, "") not in ("", "0"),
    )


def known_version() -> str:
    """Return the version of the installed package.

    Raises:
        ValueError: it does not load, or is of a version that is not known here.
    """
    try:
        version = str(import_module("transformer_engine").__version__)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ValueError(f"it does not load here ({error})") from error
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or not OLDEST <= (int(found[1]), int(found[2])) < (NEXT_MAJOR,):
        oldest = ".".join(map(str, OLDEST))
        raise ValueError(f"version {version} is installed, and {oldest} to 2.x are known here")
    return version
