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
"""The module of apex with the kernel; Megatron-LM looks for the same name."""


class Products:
    """Products on one device, whose abilities are found out once.

    Args:
        device: where the factors live.
        dtype: type of the factors.
        add: function that adds a product of 16-bit factors to a sum in fp32; ``None``: it is found
            by trial.

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
    def widens(self) -> bool:
        """Whether ``form`` writes a product in fp32 that was not rounded to 16 bits before."""
        return self._add is not None

    @property
    def accumulates(self) -> bool:
        """Whether a product adds to the sum itself, without a second kernel for the addition."""
        return self.way != "separately"

    def accumulate_(
        self, total: Tensor, left: Tensor, right: Tensor, *, begins: bool = False
    ) -> None:
        """``total += left @ right``, or ``total = left @ right`` if the sum begins here.

        Args:
            total: [i, j], contiguous; fp32, or of the type of the factors.
            left: [i, n].
            right: [n, j].
            begins: the sum begins with this product, and the old content of ``total`` is ignored.
        """
        # Nothing to add; but a sum that begins must not keep the last iteration's values.
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
        """``total = left @ right``; arguments as in ``accumulate_``, none of them empty."""
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
    """Add a product to a wider sum by the function for batches, which takes such a sum since 2.8.

    For one matrix it makes the same call of cuBLAS. Sum and result are one tensor here, because
    before 2.10 the function reads the old content of the result in place of the sum.
    """
    one = total.unsqueeze(0)
    torch.baddbmm(one, left.unsqueeze(0), right.unsqueeze(0), out_dtype=total.dtype, out=one)


def add_of_this_version() -> Add | None:
    """Return this PyTorch's function that adds 16-bit products to fp32 on a GPU, or ``None``.

    The overloads of PyTorch's operators tell, so no GPU is needed.
    """
    for packet, add in (
        (torch.ops.aten.addmm, _add_matrix),
        (torch.ops.aten.baddbmm, _add_batch_of_one),
    ):
        if "dtype_out" in packet.overloads():
            return add
    return None


def _widening(device: torch.device, dtype: torch.dtype) -> Add | None:
    """Return a function that adds 16-bit products to fp32 here, found by trial, or ``None``."""
    for add in (_add_matrix, _add_batch_of_one):
        try:
            total = torch.ones(16, 16, device=device)
            factor = torch.ones(16, 16, device=device, dtype=dtype)
            add(total, factor, factor)
            if bool((total == 17).all()):
                return add
        except (AssertionError, RuntimeError, TypeError):  # no such overload, type or GPU
            continue
    return None


def _installed(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _suits_apex(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether apex can take these tensors: it assumes dense rows of tokens, and a sum in fp32."""
    dense = total.is_contiguous() and right.is_contiguous() and left.T.is_contiguous()
    return dense and total.dtype == torch.float32
