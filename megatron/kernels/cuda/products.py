"""Matrix products whose result is wider than their factors, and products that add to a sum.

The gradient of a weight is a product of 16-bit activations, added to a sum in fp32. cuBLAS forms
the product in fp32 and can add it while it writes; a separate addition would read and write the sum
once more, and the product besides, rounded to 16 bits.
"""

import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

Way = Literal["in the product", "by apex", "separately"]
Add = Callable[[Tensor, Tensor, Tensor], object]

_LOG = logging.getLogger(__name__)

_APEX = "fused_weight_gradient_mlp_cuda"
"""The module that apex calls its kernel's, and that Megatron-LM looks for by the same name."""


class Products:
    """Products on one device; what it can do is found out once.

    Args:
        device: where the factors live.
        dtype: of the factors.
        add: adds a product of 16-bit factors to a sum in fp32; ``None``: it is found by a try.

    Attributes:
        way: how 16-bit products are added to sums in fp32.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, add: Add | None = None) -> None:
        self._apex: ModuleType | None = None
        self._add: Add | None = None
        self.way: Way = "in the product"
        if dtype == torch.float32:
            return
        self._add = add or _widening(device, dtype)
        if self._add is not None:
            return
        self._apex = _installed(_APEX)
        self.way = "separately" if self._apex is None else "by apex"
        _LOG.info("weight gradients in fp32 are added %s", self.way)

    @property
    def accumulates(self) -> bool:
        """Whether sums are not read and written by a kernel of their own."""
        return self.way != "separately"

    def accumulate_(
        self, total: Tensor, left: Tensor, right: Tensor, *, begins: bool = False
    ) -> None:
        """``total += left @ right``, or ``total = left @ right`` if the sum begins with it.

        Args:
            total: [i, j], contiguous; fp32, or of the type of the factors.
            left: [i, n].
            right: [n, j].
            begins: what ``total`` holds does not count.
        """
        if not left.numel() or not right.numel():
            if begins:
                total.zero_()
        elif begins:
            self.form(total, left, right)
        elif total.dtype == left.dtype:
            torch.addmm(total, left, right, out=total)
        elif self._add is not None:
            self._add(total, left, right)
        elif self._apex is not None and _suits_apex(total, left, right):
            self._apex.wgrad_gemm_accum_fp32(right, left.T, total)
        else:
            total.add_(left @ right)

    def form(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """``total = left @ right``; arguments as of ``accumulate_``, with at least one product."""
        if total.dtype == left.dtype:
            torch.mm(left, right, out=total)
        elif self._add is not None:
            torch.mm(left, right, out_dtype=total.dtype, out=total)
        else:
            total.copy_(left @ right)


def _add_matrix(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to a wider sum; PyTorch takes such a sum since 2.10."""
    torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def _add_batch_of_one(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Do the same by the function for batches, which takes such a sum since 2.8.

    Of one matrix it is the same call of cuBLAS. Sum and result are one tensor here: before 2.10 the
    function reads what the result holds, and never the sum.
    """
    one = total.unsqueeze(0)
    torch.baddbmm(one, left.unsqueeze(0), right.unsqueeze(0), out_dtype=total.dtype, out=one)


def add_of_this_version() -> Add | None:
    """Return what adds products of 16 bits to fp32 on a GPU with this PyTorch; ``None``: nothing.

    Its operators tell, so that no GPU is asked.
    """
    for packet, add in (
        (torch.ops.aten.addmm, _add_matrix),
        (torch.ops.aten.baddbmm, _add_batch_of_one),
    ):
        if "dtype_out" in packet.overloads():
            return add
    return None


def _widening(device: torch.device, dtype: torch.dtype) -> Add | None:
    """Return what adds products of 16 bits to fp32 here, found by a try; ``None``: nothing."""
    for add in (_add_matrix, _add_batch_of_one):
        try:
            total = torch.ones(16, 16, device=device)
            factor = torch.ones(16, 16, device=device, dtype=dtype)
            add(total, factor, factor)
            if bool((total == 17).all()):
                return add
        except (AssertionError, RuntimeError, TypeError):  # not there, not for these, no GPU
            continue
    return None


def _installed(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _suits_apex(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether apex, which goes by pointers, takes these: it wants dense rows of tokens."""
    dense = total.is_contiguous() and right.is_contiguous() and left.T.is_contiguous()
    return dense and total.dtype == torch.float32
