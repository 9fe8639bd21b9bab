"""A stand-in for the package Transformer Engine: its published signatures, in plain PyTorch.

It has what ``megatron.kernels.cuda.transformer_engine`` calls, and nothing else: names, order and
defaults of arguments, names of what tensors consist of, and layouts in memory are the package's
(2.10 to 2.20). Numbers are rounded by PyTorch's types of 8 bits, and multiplied in fp32. A product
takes the rows or columns that the package's takes, so a factor without them fails here too.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class DType(IntEnum):
    """The package's types, as far as they are needed."""

    kFloat32 = 4  # noqa: N815 (the package's name)
    kBFloat16 = 6  # noqa: N815 (the package's name)
    kFloat8E4M3 = 7  # noqa: N815 (the package's name)
    kFloat8E5M2 = 8  # noqa: N815 (the package's name)


TYPES = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
WIDE_TYPES = {DType.kFloat32: torch.float32, DType.kBFloat16: torch.bfloat16}


class Quantizer:
    """See the package."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """See the package."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def __call__(self, tensor: Tensor) -> Any:
        """Quantise a matrix."""
        assert self.internal, "otherwise the package returns subclasses of tensors"
        assert tensor.dim() == 2
        assert tensor.is_contiguous()
        return self.quantize(tensor.detach())

    def quantize(self, tensor: Tensor) -> Any:
        """Quantise a matrix."""
        raise NotImplementedError


class Float8Quantizer(Quantizer):
    """See the package."""

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert scale.shape == amax.shape == (1,)
        assert scale.dtype == amax.dtype == torch.float32
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def quantize(self, tensor: Tensor) -> "Float8TensorStorage":
        """Raise ``amax``, and use ``scale``."""
        torch.maximum(self.amax, tensor.abs().amax().float(), out=self.amax)
        return _float8(self, tensor, self.scale)


class Float8CurrentScalingQuantizer(Quantizer):
    """See the package."""

    def __init__(
        self,
        fp8_dtype: DType,
        device: torch.device,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: object = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert isinstance(device, torch.device)
        assert not any((use_existing_amax, with_amax_reduction, amax_reduction_group))
        assert not any((force_pow_2_scales, amax_epsilon))
        assert scale is amax is None
        self.dtype = fp8_dtype

    def quantize(self, tensor: Tensor) -> "Float8TensorStorage":
        """Take the scale from the tensor."""
        amax = tensor.abs().amax().float()
        return _float8(self, tensor, _scale(amax, self.dtype).view(1))


class Float8BlockQuantizer(Quantizer):
    """See the package."""

    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert force_pow_2_scales
        assert amax_epsilon == 0
        assert block_scaling_dim in (1, 2)
        self.dtype, self.block_scaling_dim = fp8_dtype, block_scaling_dim

    def quantize(self, tensor: Tensor) -> "Float8BlockwiseQTensorStorage":
        """Round rows of the matrix, and rows of the turned one."""
        height = 128 if self.block_scaling_dim == 2 else 1
        by: dict[str, Tensor | None] = dict.fromkeys(_BY_USAGE)
        for asked, name, x in (
            (self.rowwise_usage, "rowwise", tensor),
            (self.columnwise_usage, "columnwise", tensor.T),
        ):
            if asked:
                bits, inverses = _in_blocks(x, self.dtype, height, 128)
                laid = inverses if height > 1 else inverses.T
                padded = functional.pad(laid, (0, -laid.shape[1] % 4))
                by |= {f"{name}_data": bits, f"{name}_scale_inv": padded.contiguous()}
        return Float8BlockwiseQTensorStorage(
            **by, fp8_dtype=self.dtype, quantizer=self, is_2D_scaled=height > 1
        )


class MXFP8Quantizer(Quantizer):
    """See the package."""

    def __init__(self, fp8_dtype: DType, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype

    def quantize(self, tensor: Tensor) -> "MXFP8TensorStorage":
        """Round along rows, and along columns."""
        assert all(size % 32 == 0 for size in tensor.shape), "MXFP8 needs multiples of 32"
        by: dict[str, Tensor | None] = dict.fromkeys(_BY_USAGE)
        for asked, name, block, least in (
            (self.rowwise_usage, "rowwise", (1, 32), (128, 4)),
            (self.columnwise_usage, "columnwise", (32, 1), (4, 128)),
        ):
            if asked:
                bits, inverses = _in_blocks(tensor, self.dtype, *block)
                exponents = (torch.frexp(inverses).exponent + 126).to(torch.uint8)
                room = [-size % unit for size, unit in zip(exponents.shape, least, strict=True)]
                padded = functional.pad(exponents, (0, room[1], 0, room[0]))
                by |= {f"{name}_data": bits, f"{name}_scale_inv": padded}
        return MXFP8TensorStorage(**by, fp8_dtype=self.dtype, quantizer=self)


_BY_USAGE = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


@dataclass
class Float8TensorStorage:
    """One scale: the numbers, and on Hopper the turned ones."""

    data: Tensor | None
    fp8_scale_inv: Tensor
    fp8_dtype: DType
    data_transpose: Tensor | None
    quantizer: Quantizer

    is_hopper = True

    def get_metadata(self) -> dict[str, Any]:
        """See the package."""
        return dict(vars(self))

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """See the package."""
        if not self.is_hopper:
            assert self.data is not None
            self.data_transpose = None
            return
        if columnwise_usage:
            assert self.data_transpose is not None
        if rowwise_usage is False:
            self.data = None

    def rows(self) -> Tensor:
        """The matrix, as a product takes it by rows."""
        assert self.data is not None, "there are no rows"
        return self.data.view(TYPES[self.fp8_dtype]).float() * self.fp8_scale_inv

    def columns(self) -> Tensor:
        """The matrix, as a product takes it by columns."""
        if not self.is_hopper:
            return self.rows()
        assert self.data_transpose is not None, "there are no columns"
        return self.data_transpose.view(TYPES[self.fp8_dtype]).float().T * self.fp8_scale_inv


@dataclass
class _ByUsage:
    """Numbers and scales by rows, by columns or by both."""

    rowwise_data: Tensor | None
    rowwise_scale_inv: Tensor | None
    columnwise_data: Tensor | None
    columnwise_scale_inv: Tensor | None
    fp8_dtype: DType
    quantizer: Quantizer

    def get_metadata(self) -> dict[str, Any]:
        """See the package."""
        return dict(vars(self))

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """See the package."""
        for usage, name in ((rowwise_usage, "rowwise"), (columnwise_usage, "columnwise")):
            if usage:
                assert getattr(self, f"{name}_data") is not None, f"there is no {name} data"
            if usage is False:
                setattr(self, f"{name}_data", None)
                setattr(self, f"{name}_scale_inv", None)

    def bits(self, name: str) -> tuple[Tensor, Tensor]:
        """The numbers without their scales, and the scales."""
        bits, inverses = getattr(self, f"{name}_data"), getattr(self, f"{name}_scale_inv")
        assert bits is not None, f"there is no {name} data"
        return bits.view(TYPES[self.fp8_dtype]).float(), inverses


@dataclass
class Float8BlockwiseQTensorStorage(_ByUsage):
    """Columns are rows of the turned matrix."""

    is_2D_scaled: bool  # noqa: N815 (the package's name)

    def rows(self) -> Tensor:
        """The matrix, as a product takes it by rows."""
        return self._scaled("rowwise")

    def columns(self) -> Tensor:
        """The matrix, as a product takes it by columns."""
        return self._scaled("columnwise").T

    def _scaled(self, name: str) -> Tensor:
        bits, inverses = self.bits(name)
        if not self.is_2D_scaled:
            return bits * _spread(inverses.T, 1, 128, bits)
        return bits * _spread(inverses, 128, 128, bits)


@dataclass
class MXFP8TensorStorage(_ByUsage):
    """Columns are not turned."""

    def rows(self) -> Tensor:
        """The matrix, as a product takes it by rows."""
        bits, exponents = self.bits("rowwise")
        return bits * _spread(torch.exp2(exponents.float() - 127), 1, 32, bits)

    def columns(self) -> Tensor:
        """The matrix, as a product takes it by columns."""
        bits, exponents = self.bits("columnwise")
        return bits * _spread(torch.exp2(exponents.float() - 127), 32, 1, bits)


def general_gemm(
    A: Any,
    B: Any,
    out_dtype: torch.dtype | None = None,
    quantization_params: Quantizer | None = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: object = None,
    ub_type: object = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
) -> tuple[Tensor | None, ...]:
    """Multiply as BLAS does, whose matrices lie by columns: op(B) op(A), for matrices by rows."""
    assert not any((gelu, bulk_overlap, quantization_params, ub, ub_type))
    assert gelu_in is extra_output is None
    assert (alpha, beta) == (1.0, None)
    assert layout in ("TN", "NN", "NT"), f"GEMM layout {layout} not supported."
    left = B.columns().T if layout[1] == "T" else B.rows()
    right = A.rows().T if layout[0] == "T" else A.columns()
    product = left @ right
    if bias is not None:
        assert not grad, "the package would form the gradient of a bias"
        product = product + bias.float()
    if out is None:
        assert not accumulate
        assert out_dtype is not None
        return product.to(out_dtype), None, None, None
    assert out.is_contiguous(), "Output tensor is not contiguous."
    assert out.dtype == out_dtype
    out.copy_(out.float() + product if accumulate else product)
    return out, None, None, None


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    ln_out: object,
    quantizer: Quantizer,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Form a norm and round it, once."""
    x = _checked(input, weight, ln_out, quantizer, otype, sm_margin, zero_centered_gamma)
    mean = x.mean(-1)
    centred = x - mean[:, None]
    inverse = (centred.square().mean(-1) + eps).rsqrt()
    normed = centred * inverse[:, None] * weight.float() + bias.float()
    return [quantizer.quantize(normed), mean, inverse]


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: object,
    quantizer: Quantizer,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Form a norm and round it, once."""
    x = _checked(input, weight, ln_out, quantizer, otype, sm_margin, zero_centered_gamma)
    inverse = (x.square().mean(-1) + eps).rsqrt()
    return [quantizer.quantize(x * inverse[:, None] * weight.float()), None, inverse]


def _checked(
    x: Tensor,
    weight: Tensor,
    ln_out: object,
    quantizer: Quantizer,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> Tensor:
    """The input of a norm that the package rounds in the same pass, and would round rightly."""
    assert x.dim() == 2
    assert x.is_contiguous()
    assert x.dtype == weight.dtype == WIDE_TYPES[otype]
    assert ln_out is None
    assert not sm_margin
    assert not zero_centered_gamma
    assert quantizer.internal, "otherwise the package returns subclasses of tensors"
    by_cudnn = os.environ.get("NVTE_NORM_FWD_USE_CUDNN") == "1"
    if isinstance(quantizer, MXFP8Quantizer):
        assert by_cudnn
        assert all(size % 128 == 0 for size in x.shape), "the package would round it afterwards"
    else:
        assert isinstance(quantizer, Float8Quantizer), "the package would round it afterwards"
        assert not by_cudnn, "the largest magnitude of other norms would be lost"
    return x.float()


def available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """The signature of ``is_fp8_available`` and its like: this GPU has a recipe."""
    return (True, "") if return_reason else True


def lacking(return_reason: bool = False) -> bool | tuple[bool, str]:
    """This GPU does not have a recipe."""
    return (False, "Device compute capability 10.0 or higher required") if return_reason else False


@contextmanager
def installed(*, hopper: bool = True, version: str = "2.14.0", **changed: Any) -> Iterator[None]:
    """Let the package be there.

    Args:
        hopper: products take turned factors, as on Hopper; otherwise, as on Blackwell.
        version: of the package.
        **changed: other attributes of ``transformer_engine.pytorch``; ``None``: missing.
    """
    there = {name: getattr(sys.modules[__name__], name) for name in _EXPORTED}
    there |= dict.fromkeys(("is_fp8_available", "is_fp8_block_scaling_available"), available)
    there |= {"is_mxfp8_available": available} | changed
    modules: dict[str, dict[str, Any]] = {
        "transformer_engine": {"__version__": version},
        "transformer_engine.pytorch.constants": {
            "TE_DType": {torch_type: kind for kind, torch_type in (TYPES | WIDE_TYPES).items()}
        },
        "transformer_engine.pytorch": {k: v for k, v in there.items() if v is not None},
        "transformer_engine.pytorch.cpp_extensions": {
            "general_gemm": changed.get("general_gemm", general_gemm)
        },
        "transformer_engine_torch": {
            name: found
            for name, norm in (("layernorm_fwd", layernorm_fwd), ("rmsnorm_fwd", rmsnorm_fwd))
            if (found := changed.get(name, norm)) is not None
        },
    }
    before = {name: sys.modules.get(name) for name in modules}
    was, Float8TensorStorage.is_hopper = Float8TensorStorage.is_hopper, hopper
    try:
        for name, attributes in modules.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(attributes)
        yield
    finally:
        Float8TensorStorage.is_hopper = was
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


_EXPORTED = (
    "Float8Quantizer",
    "Float8CurrentScalingQuantizer",
    "Float8BlockQuantizer",
    "MXFP8Quantizer",
)


def _scale(amax: Tensor, dtype: DType) -> Tensor:
    """The scale that takes a magnitude to the largest number; of a zero it is 1."""
    return torch.where(amax > 0, torch.finfo(TYPES[dtype]).max / amax, 1.0)


def _float8(quantizer: Any, tensor: Tensor, scale: Tensor) -> Float8TensorStorage:
    bits = _rounded(tensor.float() * scale, quantizer.dtype)
    turns = quantizer.columnwise_usage and Float8TensorStorage.is_hopper
    keeps = quantizer.rowwise_usage or not Float8TensorStorage.is_hopper
    return Float8TensorStorage(
        data=bits if keeps else None,
        fp8_scale_inv=1 / scale,
        fp8_dtype=quantizer.dtype,
        data_transpose=bits.T.contiguous() if turns else None,
        quantizer=quantizer,
    )


def _rounded(scaled: Tensor, dtype: DType) -> Tensor:
    """The bytes of numbers, of which the larger ones are cut off."""
    most = torch.finfo(TYPES[dtype]).max
    return scaled.clamp(-most, most).to(TYPES[dtype]).view(torch.uint8)


def _in_blocks(x: Tensor, dtype: DType, height: int, width: int) -> tuple[Tensor, Tensor]:
    """The bytes of a matrix, and the inverse scales of its blocks, powers of two."""
    up, across = (math.ceil(s / b) for s, b in zip(x.shape, (height, width), strict=True))
    whole = functional.pad(x.float(), (0, across * width - x.shape[1], 0, up * height - len(x)))
    amax = whole.view(up, height, across, width).abs().amax((1, 3))
    scale = torch.exp2((torch.frexp(_scale(amax, dtype)).exponent - 1).float())
    bits = _rounded(x.float() * _spread(scale, height, width, x), dtype)
    return bits.contiguous(), 1 / scale


def _spread(scales: Tensor, height: int, width: int, of: Tensor) -> Tensor:
    """The scale of every number of a matrix; scales may be padded."""
    wide = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return wide[: of.shape[0], : of.shape[1]]
