"""Kernels of a CPU: PyTorch's own where they are fast, otherwise ours, which are C++ for bf16.

``CpuKernels`` needs no compiler; ``CompiledKernels`` adds the bf16 code of ``cpu_kernels.cpp``.
Only attention with plain scores within whole samples has kernels here; other attention is the
reference's.
"""

import torch
from torch import Tensor

from megatron.kernels import grouped
from megatron.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from megatron.kernels.autograd import apply
from megatron.kernels.cpu import compiled_attention
from megatron.kernels.cpu.activations import (
    CompiledActivation,
    PositiveSquaredReLU,
    TiledGelu,
)
from megatron.kernels.cpu.layer_norm import CompiledLayerNorm, WideLayerNorm
from megatron.kernels.cpu.library import Library, expect
from megatron.kernels.cpu.partial_attention import host_flash, host_flash_gradients
from megatron.kernels.cpu.short_attention import LONGEST, ShortCausalAttention
from megatron.kernels.reference.activations import with_bias
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.reference.partial_attention import Attended, AttentionPart, Gradients

TILE_ROWS = 1000
"""Vocabulary rows of a tile: its [t, n] part should stay in the second-level cache. The number is
no power of two, because rows of the transposed tile that are 2048 bytes apart fall into the same
cache sets, which costs 5 %."""

SLICE_ELEMENTS = 1 << 17
"""Elements that are added at a time. PyTorch adds bf16 to fp32 through an fp32 copy of the whole
operand, which takes 200 ms per 100M elements. In slices of this size the copy stays in the L2
cache: 55 ms, the speed of an fp32 addition (one core, 17 GB/s). The compiled function needs no
copy."""


class CpuKernels(ReferenceKernels):
    """Kernels for any type, in PyTorch.

    Args:
        tile_rows: vocabulary rows that the output layer works on at a time.
    """

    def __init__(self, tile_rows: int = TILE_ROWS) -> None:
        super().__init__(tile_rows)

    def gelu(self, x: Tensor, bias_f: Tensor | None = None) -> Tensor:
        """See ``Kernels``; arithmetic is fp32 for bf16."""
        return apply(TiledGelu, with_bias(x, bias_f))

    def squared_relu(self, x: Tensor, bias_f: Tensor | None = None) -> Tensor:
        """See ``Kernels``."""
        return apply(PositiveSquaredReLU, with_bias(x, bias_f))

    def grouped_product(self, x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
        """See ``Kernels``."""
        return grouped.product(x_si, weight_gio, ends_g)

    def grouped_weight_product(self, grad_so: Tensor, x_si: Tensor, ends_g: Tensor) -> Tensor:
        """See ``Kernels``."""
        return grouped.weight_product(grad_so, x_si, ends_g)

    def layer_norm(self, x: Tensor, weight_h: Tensor, bias_h: Tensor, epsilon: float) -> Tensor:
        """See ``Kernels``; fp32 is computed in float64."""
        if x.dtype == weight_h.dtype == torch.float32:
            return apply(WideLayerNorm, x, weight_h, bias_h, epsilon)
        return super().layer_norm(x, weight_h, bias_h, epsilon)

    def _attend(
        self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, options: AttentionOptions
    ) -> Tensor:
        if options.are_plain and q_basd.shape[2] <= LONGEST:
            return apply(ShortCausalAttention, q_basd, k_bgsd, v_bgsd)
        return super()._attend(q_basd, k_bgsd, v_bgsd, options)

    def attend_to_part(self, part: AttentionPart) -> Attended:
        """See ``Kernels``."""
        return host_flash(part) if part.view is None else super().attend_to_part(part)

    def gradients_of_part(
        self, part: AttentionPart, whole: Attended, grad_basd: Tensor
    ) -> Gradients:
        """See ``Kernels``."""
        if part.view is not None:
            return super().gradients_of_part(part, whole, grad_basd)
        return host_flash_gradients(part, whole, grad_basd)

    def accumulate_(self, total: Tensor, part: Tensor) -> None:
        """See ``Kernels``."""
        if part.dtype == total.dtype:
            total.add_(part)
            return
        elements_per_row = max(1, part.numel() // max(1, part.shape[0]))
        rows = max(1, SLICE_ELEMENTS // elements_per_row)
        for total_slice, part_slice in zip(total.split(rows), part.split(rows), strict=True):
            total_slice.add_(part_slice)


class CompiledKernels(CpuKernels):
    """Kernels for bf16 activations and fp32 statistics, in C++; they run in the caller's thread.

    Args:
        library: compiled from ``cpu_kernels.cpp``.
        tile_rows: vocabulary rows that the output layer works on at a time.
    """

    def __init__(self, library: Library, tile_rows: int = TILE_ROWS) -> None:
        super().__init__(tile_rows)
        self._library = library
        self._scratch = torch.empty(0, dtype=torch.bfloat16)

    def gelu(self, x: Tensor, bias_f: Tensor | None = None) -> Tensor:
        """See ``Kernels``."""
        return apply(CompiledActivation, with_bias(x, bias_f), self._library, True)

    def squared_relu(self, x: Tensor, bias_f: Tensor | None = None) -> Tensor:
        """See ``Kernels``."""
        return apply(CompiledActivation, with_bias(x, bias_f), self._library, False)

    def layer_norm(self, x: Tensor, weight_h: Tensor, bias_h: Tensor, epsilon: float) -> Tensor:
        """See ``Kernels``."""
        return apply(CompiledLayerNorm, x, weight_h, bias_h, epsilon, self._library)

    def _attend(
        self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, options: AttentionOptions
    ) -> Tensor:
        if options.are_plain and q_basd.shape[2] <= compiled_attention.LONGEST:
            return compiled_attention.separate_attention(q_basd, k_bgsd, v_bgsd, self._library)
        return super()._attend(q_basd, k_bgsd, v_bgsd, options)

    def causal_self_attention(
        self, qkv_bsgcd: Tensor, *, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor:
        """See ``Kernels``."""
        if options.are_plain and qkv_bsgcd.shape[1] <= compiled_attention.LONGEST:
            return compiled_attention.fused_attention(qkv_bsgcd, self._library)
        return super().causal_self_attention(qkv_bsgcd, options=options)

    def accumulate_(self, total: Tensor, part: Tensor) -> None:
        """See ``Kernels``."""
        dense = total.is_contiguous() and part.is_contiguous()
        if dense and (total.dtype, part.dtype) == (torch.float32, torch.bfloat16):
            assert total.shape == part.shape
            self._library.add_bf16(total.data_ptr(), part.data_ptr(), part.numel())
        else:
            super().accumulate_(total, part)

    def exponentials_(self, logits_tn: Tensor, max_n: Tensor, sum_n: Tensor) -> Tensor:
        """See ``TileOperations``."""
        expect(torch.bfloat16, logits_tn)
        expect(torch.float32, max_n, sum_n)
        shrink_n = torch.empty_like(sum_n)
        carried = (x_n.data_ptr() for x_n in (max_n, sum_n, shrink_n))
        self._library.exp_tile_bf16(logits_tn.data_ptr(), *logits_tn.shape, *carried)
        return shrink_n

    def shifted_exponentials_(self, logits_tn: Tensor, shift_n: Tensor) -> None:
        """See ``TileOperations``."""
        expect(torch.bfloat16, logits_tn)
        expect(torch.float32, shift_n)
        self._library.shifted_exp_bf16(logits_tn.data_ptr(), *logits_tn.shape, shift_n.data_ptr())

    def carry_input_gradient_(
        self, total_nh: Tensor, shrink_n: Tensor, exp_tn: Tensor, weight_th: Tensor
    ) -> None:
        """See ``TileOperations``."""
        part_nh = self._transposed(exp_tn) @ weight_th
        expect(torch.bfloat16, part_nh)
        expect(torch.float32, total_nh, shrink_n)
        assert total_nh.shape == part_nh.shape
        n, h = total_nh.shape
        self._library.rescale_add_bf16(
            total_nh.data_ptr(), shrink_n.data_ptr(), part_nh.data_ptr(), n, h
        )

    def add_input_gradient_(
        self, gradient_nh: Tensor, factor_n: Tensor, exp_tn: Tensor, weight_th: Tensor
    ) -> None:
        """See ``TileOperations``."""
        product_nh = (self._transposed(exp_tn) @ weight_th).to(gradient_nh.dtype)
        gradient_nh.addcmul_(product_nh, factor_n.unsqueeze(1))

    def add_weight_gradient_(
        self, gradient_th: Tensor, factor_n: Tensor, exp_tn: Tensor, x_nh: Tensor
    ) -> None:
        """See ``TileOperations``."""
        expect(torch.bfloat16, x_nh)
        expect(torch.float32, factor_n)
        scaled_nh = torch.empty_like(x_nh)
        n, h = x_nh.shape
        self._library.scale_bf16(x_nh.data_ptr(), factor_n.data_ptr(), n, h, scaled_nh.data_ptr())
        self.accumulate_product_(gradient_th, exp_tn, scaled_nh)

    def _transposed(self, tile_tn: Tensor) -> Tensor:
        """Return the tile as a dense [n, t], valid until the next call.

        With a transposed view, oneDNN's product takes twice as long.
        """
        expect(torch.bfloat16, tile_tn)
        if self._scratch.numel() < tile_tn.numel():
            self._scratch = torch.empty(tile_tn.numel(), dtype=torch.bfloat16)
        t, n = tile_tn.shape
        tile_nt = self._scratch[: t * n].view(n, t)
        self._library.transpose_bf16(tile_tn.data_ptr(), t, n, tile_nt.data_ptr())
        return tile_nt
