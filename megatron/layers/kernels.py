"""The elementwise work of S and T on tiles: fused C++ on a CPU in bf16, PyTorch elsewhere."""

import ctypes
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron.layers.cpu_library import cpu_library, expect

EXPONENTIALS_AT_ONCE = 1 << 22
"""How many elements of a tile PyTorch's operations turn into exponentials at a time: 16 MiB in
fp32. A slice so large keeps a GPU busy for longer than it takes to launch the work on the next."""


class Kernels(Protocol):
    """Elementwise work; all of it in place, without autograd."""

    def exp_tile(self, logits_tn: Tensor, max_n: Tensor, sum_n: Tensor) -> Tensor:
        """Turn one tile of logits into exponentials and carry the running maximum and sum on.

        Args:
            logits_tn: logits in, exp(logits - new maximum) out, contiguous, in the activation
                dtype.
            max_n: running maximum of every token; exact in the activation dtype, being a logit.
            sum_n: running sum of the exponentials relative to the running maximum.

        Returns:
            [n] by what all exponentials of earlier tiles shrink: exp(old - new maximum).
        """
        ...

    def transposed(self, tile_tn: Tensor) -> Tensor:
        """Return the tile as [n, t], in the layout that products like; valid until the next."""
        ...

    def rescale_add(self, total_nh: Tensor, factor_n: Tensor, part_nh: Tensor) -> None:
        """``total = total * factor + part``, the total in the dtype of statistics."""
        ...

    def scaled(self, x_nh: Tensor, factor_n: Tensor) -> Tensor:
        """Return ``x * factor`` row by row in the dtype of x; the factor is a statistic."""
        ...

    def add(self, total_th: Tensor, part_th: Tensor) -> None:
        """``total += part``, the total in the dtype of statistics, both contiguous."""
        ...


class TorchKernels:
    """Any device, any dtype."""

    def exp_tile(self, logits_tn: Tensor, max_n: Tensor, sum_n: Tensor) -> Tensor:
        """See ``Kernels``."""
        new_max_n = torch.maximum(max_n, logits_tn.amax(0).to(max_n.dtype))
        shrink_n = (max_n - new_max_n).exp_()
        sum_n.mul_(shrink_n)
        for part_tn in logits_tn.split(max(1, EXPONENTIALS_AT_ONCE // len(max_n))):
            # In the dtype of statistics: a difference rounded to bf16 would be far off.
            exp_tn = (part_tn - new_max_n).exp_()
            sum_n.add_(exp_tn.sum(0))
            part_tn.copy_(exp_tn)
        max_n.copy_(new_max_n)
        return shrink_n

    def transposed(self, tile_tn: Tensor) -> Tensor:
        """See ``Kernels``."""
        return tile_tn.T

    def rescale_add(self, total_nh: Tensor, factor_n: Tensor, part_nh: Tensor) -> None:
        """See ``Kernels``."""
        total_nh.mul_(factor_n.unsqueeze(1)).add_(part_nh)

    def scaled(self, x_nh: Tensor, factor_n: Tensor) -> Tensor:
        """See ``Kernels``."""
        return torch.mul(x_nh, factor_n.unsqueeze(1), out=torch.empty_like(x_nh))

    def add(self, total_th: Tensor, part_th: Tensor) -> None:
        """See ``Kernels``."""
        total_th.add_(part_th)


class NativeKernels:
    """CPU, bf16 activations, fp32 statistics, one thread: the caller's.

    Args:
        library: compiled from ``cpu_kernels.cpp``.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._scratch = torch.empty(0, dtype=torch.bfloat16)

    def exp_tile(self, logits_tn: Tensor, max_n: Tensor, sum_n: Tensor) -> Tensor:
        """See ``Kernels``."""
        expect(torch.bfloat16, logits_tn)
        expect(torch.float32, max_n, sum_n)
        shrink_n = torch.empty_like(sum_n)
        carried = (x_n.data_ptr() for x_n in (max_n, sum_n, shrink_n))
        self._library.exp_tile_bf16(logits_tn.data_ptr(), *logits_tn.shape, *carried)
        return shrink_n

    def transposed(self, tile_tn: Tensor) -> Tensor:
        """See ``Kernels``; oneDNN takes twice as long for a product with a transposed view."""
        expect(torch.bfloat16, tile_tn)
        if self._scratch.numel() < tile_tn.numel():
            self._scratch = torch.empty(tile_tn.numel(), dtype=torch.bfloat16)
        t, n = tile_tn.shape
        tile_nt = self._scratch[: t * n].view(n, t)
        self._library.transpose_bf16(tile_tn.data_ptr(), t, n, tile_nt.data_ptr())
        return tile_nt

    def rescale_add(self, total_nh: Tensor, factor_n: Tensor, part_nh: Tensor) -> None:
        """See ``Kernels``."""
        expect(torch.bfloat16, part_nh)
        expect(torch.float32, total_nh, factor_n)
        assert total_nh.shape == part_nh.shape
        n, h = total_nh.shape
        self._library.rescale_add_bf16(
            total_nh.data_ptr(), factor_n.data_ptr(), part_nh.data_ptr(), n, h
        )

    def scaled(self, x_nh: Tensor, factor_n: Tensor) -> Tensor:
        """See ``Kernels``."""
        expect(torch.bfloat16, x_nh)
        expect(torch.float32, factor_n)
        result_nh = torch.empty_like(x_nh)
        n, h = x_nh.shape
        self._library.scale_bf16(x_nh.data_ptr(), factor_n.data_ptr(), n, h, result_nh.data_ptr())
        return result_nh

    def add(self, total_th: Tensor, part_th: Tensor) -> None:
        """See ``Kernels``."""
        expect(torch.bfloat16, part_th)
        expect(torch.float32, total_th)
        assert total_th.shape == part_th.shape
        self._library.add_bf16(total_th.data_ptr(), part_th.data_ptr(), total_th.numel())


def make_kernels(device: torch.device, dtype: torch.dtype, cache: Path | None = None) -> Kernels:
    """Return the fastest kernels for activations of ``dtype`` on ``device``.

    Args:
        device: where the output layer computes.
        dtype: of activations.
        cache: folder of compiled libraries, by default the project's.
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return TorchKernels()
    library = cpu_library(cache)
    return TorchKernels() if library is None else NativeKernels(library)
