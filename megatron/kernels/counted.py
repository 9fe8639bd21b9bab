"""Kernels that a count runs on the ``meta`` device, in place of a GPU's kernels.

A *count* tells what a GPU would compute, move and keep. These kernels launch the operators that the
GPU would launch, in the same order, on tensors without values. The GPU belongs to another machine,
so nothing here asks which device, library or package this machine has. Only the version of PyTorch
is taken from this machine.

Shapes: b batch, a query heads, g key/value heads, s sequence, d channels of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.autograd import apply, once_differentiable
from megatron.kernels.cuda.grouped import grouped_weight_product
from megatron.kernels.cuda.kernels import TYPES, CudaKernels
from megatron.kernels.cuda.products import Products, add_of_this_version
from megatron.kernels.declared import Declaration, declare, of_groups
from megatron.kernels.face import Kernels
from megatron.kernels.reference.grouped_attention import grouped_attention, knows_repeated
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.reference.packed_attention import knows_packed
from megatron.kernels.reference.partial_attention import AttentionPart, knows_flash
from megatron.kernels.reference.windowed_attention import knows_window, windowed_attention

Shapes = Callable[..., Tensor | tuple[Tensor, Tensor]]
"""A function that returns the results of an operator as tensors without values."""

_META: Final = torch.device("meta")
_WIDEST_HEAD: Final = 256
_CHANNELS_AT_ONCE: Final = 8
_BYTES_AT_ONCE: Final = 16
_PACKED_ATTENTION: Final = "torch.nn.attention.varlen"
"""PyTorch's module for attention within packed documents. The count checks only that it exists."""

_aten = torch.ops.aten

_LIBRARY: Final = torch.library.Library("megatron_kernels", "FRAGMENT")


@dataclass(frozen=True)
class CountedGpu:
    """The products of NVIDIA's libraries that one generation of GPUs has and an A100 lacks.

    Attributes:
        has_cudnn_attention: cuDNN's attention is the fastest one for plain scores.
        has_block_products: cuBLAS multiplies in 8 bits with scales of blocks.
    """

    has_cudnn_attention: bool = False
    has_block_products: bool = False


AMPERE: Final = CountedGpu()


@cache
def counted_kernels(dtype: torch.dtype, gpu: CountedGpu = AMPERE) -> Kernels:
    """Return, for a count, the kernels that an NVIDIA GPU (Ampere or later) would choose.

    The count assumes that the GPU's machine has this version of PyTorch, with the cuDNN and the
    cuBLAS that belong to it, and lacks the packages apex, flash-attn and Transformer Engine.

    Args:
        dtype: type of activations. For types other than bf16, fp16 and fp32 a GPU uses PyTorch's
            operations.
        gpu: the generation of the GPU.
    """
    return _CountedKernels(_META, dtype, gpu) if dtype in TYPES else _CountedReference()


class _CountedReference(ReferenceKernels):
    """PyTorch's operations. An operation that would read values returns one product's shape."""

    def grouped_product(self, x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
        """See ``Kernels``."""
        return _grouped_mm(x_si, weight_gio, ends_g)

    def grouped_weight_product(self, grad_so: Tensor, x_si: Tensor, ends_g: Tensor) -> Tensor:
        """See ``Kernels``."""
        out_goi = x_si.new_empty(len(ends_g), grad_so.shape[1], x_si.shape[1])
        grouped_weight_product(out_goi, grad_so, x_si, ends_g)
        return out_goi


class _CountedKernels(CudaKernels):
    def __init__(self, device: torch.device, dtype: torch.dtype, gpu: CountedGpu) -> None:
        self._gpu = gpu
        super().__init__(device, dtype)
        self._has_grouped = True

    def _grouped_mm(self, x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
        return _grouped_mm(x_si, weight_gio, ends_g)

    def _find_products(self, device: torch.device, dtype: torch.dtype) -> Products:
        return Products(device, dtype, add_of_this_version())

    def _plain_rms_norm(self, x: Tensor, weight_h: Tensor, epsilon: float) -> Tensor:
        return apply(_FusedRMSNorm, x, weight_h, epsilon)

    def _finds_cudnn(self, device: torch.device) -> bool:
        return self._gpu.has_cudnn_attention

    def _finds_block_products(self, device: torch.device) -> bool:
        return self._gpu.has_block_products

    def _attends_partly(self, q_basd: Tensor) -> bool:
        return True

    def _flashes(self, part: AttentionPart) -> bool:
        return knows_flash(part)

    def _packs(self, q_basd: Tensor, options: AttentionOptions) -> bool:
        is_there = find_spec(_PACKED_ATTENTION) is not None
        return is_there and knows_packed(q_basd, options)

    def _attend_within(
        self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend as without documents: the count takes every sample for one document."""
        whole = replace(options, documents=None)
        return self.causal_attention(q_basd, k_bgsd, v_bgsd, options=whole)

    def _attends_in_window(self, q_basd: Tensor, k_bgsd: Tensor, options: AttentionOptions) -> bool:
        return knows_window(q_basd, k_bgsd, options)

    def _attend_in_window(
        self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend as without documents: the count takes every sample for one document."""
        if options.documents is None:
            return super()._attend_in_window(q_basd, k_bgsd, v_bgsd, options)
        return windowed_attention(q_basd, k_bgsd, v_bgsd, replace(options, documents=None))

    def _attend(
        self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Call the kernel that ``scaled_dot_product_attention`` would choose on the GPU.

        Flash attention takes 16-bit types and query groups. The memory-efficient kernel takes fp32
        too, but no groups. Where neither fits, PyTorch multiplies matrices. PyTorch 2.13 prefers
        cuDNN's attention to flash attention on Hopper if cuDNN is newer than 9.15. Both read, write
        and keep tensors of the same sizes, so the count says flash attention for either.
        """
        is_whole = q_basd.shape[2] == k_bgsd.shape[2]
        dropout, scale = options.dropout, options.scores.scale
        if not is_whole and not dropout and self._seen_by_cudnn(q_basd, k_bgsd):
            return super()._attend(q_basd, k_bgsd, v_bgsd, options)
        channels, is_wide = q_basd.shape[3], q_basd.dtype == torch.float32
        if not is_wide and channels <= _WIDEST_HEAD:
            return _flash_attention(q_basd, k_bgsd, v_bgsd, dropout, scale)
        if knows_repeated(q_basd, k_bgsd):
            return grouped_attention(q_basd, k_bgsd, v_bgsd, dropout, scale)
        copies = q_basd.shape[1] // k_bgsd.shape[1]
        is_aligned = channels * q_basd.element_size() % _BYTES_AT_ONCE == 0
        if copies == 1 and is_aligned:
            keeps_sums = torch.is_grad_enabled() and q_basd.requires_grad
            efficient_basd: Tensor = _aten._scaled_dot_product_efficient_attention(
                q_basd, k_bgsd, v_bgsd, None, keeps_sums, dropout, True, scale=scale
            )[0]
            return efficient_basd
        multiplied_basd: Tensor = _aten._scaled_dot_product_attention_math(
            q_basd, k_bgsd, v_bgsd, None, dropout, True, scale=scale, enable_gqa=copies > 1
        )[0]
        return multiplied_basd


def _grouped_mm(left: Tensor, right: Tensor, ends_g: Tensor) -> Tensor:
    made: Tensor = torch.ops.megatron_kernels._grouped_mm(left, right, ends_g)
    return made


def _flash_attention(
    q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, dropout: float, scale: float | None
) -> Tensor:
    """Call PyTorch's flash attention on heads that are padded to a multiple of 8 channels."""
    channels = q_basd.shape[3]
    lacking = -channels % _CHANNELS_AT_ONCE
    heads = [q_basd, k_bgsd, v_bgsd]
    if lacking:
        heads = [functional.pad(each, (0, lacking)) for each in heads]
        scale = channels**-0.5 if scale is None else scale
    out_basd: Tensor = _aten._scaled_dot_product_flash_attention(
        *heads, dropout, True, scale=scale
    )[0]
    return out_basd[..., :channels] if lacking else out_basd


class _FusedRMSNorm(torch.autograd.Function):
    """PyTorch's fused RMSNorm of a GPU; on ``meta`` PyTorch itself would run several operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_h: Tensor, epsilon: float) -> Tensor:
        """[..., h] -> [..., h]."""
        y, inverse = torch.ops.megatron_kernels._fused_rms_norm(
            x, weight_h.shape, weight_h, epsilon
        )
        ctx.save_for_backward(x, weight_h, inverse)
        made: Tensor = y
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input and weight."""
        x, weight_h, inverse = ctx.saved_tensors
        x_grad, weight_grad_h = torch.ops.megatron_kernels._fused_rms_norm_backward(
            grad, x, weight_h.shape, inverse, weight_h, [True, True]
        )
        return x_grad, weight_grad_h, None


def _stands_for(schema: str, work: Declaration | None = None) -> Callable[[Shapes], Shapes]:
    """Return a decorator that registers a function as the operator of ``schema``, on ``meta`` only.

    PyTorch has an operator of the same name. On ``meta`` that one is several operations, or takes
    bf16 only. ``work`` declares the work of its launch, as in ``cuda/library.py``.
    """

    def define(shapes: Shapes) -> Shapes:
        name = _LIBRARY.define(schema)
        _LIBRARY.impl(name, shapes, "Meta")
        if work is not None:
            declare(f"{_LIBRARY.ns}::{name}", work)
        return shapes

    return define


@_stands_for(
    "_grouped_mm(Tensor self, Tensor mat2, Tensor offs) -> Tensor",
    lambda mat2, offs, **given: of_groups(given["self"], mat2, len(offs)),
)
def _grouped_shapes(left: Tensor, right: Tensor, ends_g: Tensor) -> Tensor:
    return left.new_empty(len(left), right.shape[2])


@_stands_for(
    "_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor weight, float eps) "
    "-> (Tensor, Tensor)"
)
def _rms_norm_shapes(
    x: Tensor, normalized_shape: list[int], weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rows = x.shape[: x.dim() - len(normalized_shape)]
    ones = (1,) * len(normalized_shape)
    return torch.empty_like(x), x.new_empty((*rows, *ones), dtype=torch.float32)


@_stands_for(
    "_fused_rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, "
    "Tensor rstd, Tensor weight, bool[] output_mask) -> (Tensor, Tensor)"
)
def _rms_norm_backward_shapes(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)
