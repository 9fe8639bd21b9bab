"""Products of groups of rows by other packages: Transformer Engine, and ``grouped_gemm``.

Both packages are optional, and a flag asks for one of them. Both take the numbers of rows from the
host, so the host must wait for the device; the kernels of this project need no such wait
(``grouped.py``). So ends of groups are tensors of the host here.

Shapes: s rows of all groups, g groups, i inputs, o outputs.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import signature
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from megatron.kernels.cuda.transformer_engine import Layout, known_version
from megatron.kernels.grouped import GroupedKernels
from megatron.native.packages import fault_of_names

PackageName: TypeAlias = Literal["transformer_engine", "grouped_gemm"]

_CALLED: Final[Mapping[PackageName, tuple[str, str, str]]] = {
    "transformer_engine": (
        "transformer_engine.pytorch.cpp_extensions",
        "general_grouped_gemm",
        "A B out quantization_params out_dtype layout m_splits grad accumulate single_output",
    ),
    "grouped_gemm": ("grouped_gemm.backend", "gmm", "a b batch_sizes trans_a trans_b"),
}
"""For each package its module, the function that is called, and the names of its arguments."""

TYPES: Final[Mapping[PackageName, tuple[torch.dtype, ...]]] = {
    "transformer_engine": (torch.bfloat16, torch.float16),
    "grouped_gemm": (torch.bfloat16,),
}
"""The types of factors that a package multiplies. Transformer Engine would round fp32 to TF32."""


class EngineGroups:
    """See ``GroupedKernels``: products by Transformer Engine, which adds gradients up in fp32.

    Args:
        multiply: the package's ``general_grouped_gemm``.
    """

    def __init__(self, multiply: Callable[..., Any]) -> None:
        self._multiply = multiply

    def grouped_product(self, x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
        """See ``GroupedKernels``."""
        out_so = x_si.new_empty(len(x_si), weight_gio.shape[2])
        if len(x_si):
            turned = not weight_gio.is_contiguous()
            matrices = weight_gio.transpose(1, 2) if turned else weight_gio
            layout: Layout = "TN" if turned else "NN"
            sizes = _sizes(ends_g).tolist()
            rows = x_si.contiguous().split(sizes)
            self._form(matrices.unbind(0), rows, [out_so], layout, sizes, single_output=True)
        return out_so

    def grouped_weight_product(self, grad_so: Tensor, x_si: Tensor, ends_g: Tensor) -> Tensor:
        """See ``GroupedKernels``."""
        out_goi = x_si.new_empty(len(ends_g), grad_so.shape[1], x_si.shape[1])
        self.accumulate_grouped_product_(out_goi, grad_so, x_si, ends_g, begins=True)
        return out_goi

    def accumulate_grouped_product_(
        self, total_goi: Tensor, grad_so: Tensor, x_si: Tensor, ends_g: Tensor, *, begins: bool
    ) -> None:
        """See ``GroupedKernels``."""
        counts_g = _sizes(ends_g)
        if len(x_si):
            sizes = counts_g.tolist()
            factors = (x_si.contiguous().split(sizes), grad_so.contiguous().split(sizes))
            self._form(*factors, [*total_goi.unbind(0)], "NT", sizes, accumulate=not begins)
        if begins:
            _zero_unused_(total_goi, counts_g)

    def _form(
        self,
        left: tuple[Tensor, ...],
        right: tuple[Tensor, ...],
        out: list[Tensor],
        layout: Layout,
        sizes: list[int],
        **options: bool,
    ) -> None:
        """Write a product for each group; ``Layout`` explains the layouts."""
        self._multiply(
            [*left],
            [*right],
            out,
            quantization_params=[None] * len(sizes),
            out_dtype=out[0].dtype,
            layout=layout,
            m_splits=sizes,
            grad=layout != "TN",
            **options,
        )


class GroupedGemm:
    """See ``GroupedKernels``: products of bf16 by the package ``grouped_gemm``.

    The package cannot add to an earlier sum: a gradient is rounded to bf16, and then added in fp32.

    Args:
        multiply: the package's ``gmm``.
    """

    def __init__(self, multiply: Callable[..., Tensor]) -> None:
        self._multiply = multiply

    def grouped_product(self, x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
        """See ``GroupedKernels``."""
        if not len(x_si):
            return x_si.new_empty(0, weight_gio.shape[2])
        turned = not weight_gio.is_contiguous()
        matrices = weight_gio.transpose(1, 2) if turned else weight_gio
        return self._multiply(x_si.contiguous(), matrices, _sizes(ends_g), False, turned)

    def grouped_weight_product(self, grad_so: Tensor, x_si: Tensor, ends_g: Tensor) -> Tensor:
        """See ``GroupedKernels``."""
        counts_g = _sizes(ends_g)
        if not len(x_si):
            return x_si.new_zeros(len(ends_g), grad_so.shape[1], x_si.shape[1])
        out_goi = self._multiply(grad_so.contiguous(), x_si.contiguous(), counts_g, True, False)
        _zero_unused_(out_goi, counts_g)
        return out_goi

    def accumulate_grouped_product_(
        self, total_goi: Tensor, grad_so: Tensor, x_si: Tensor, ends_g: Tensor, *, begins: bool
    ) -> None:
        """See ``GroupedKernels``."""
        product_goi = self.grouped_weight_product(grad_so, x_si, ends_g)
        if begins:
            total_goi.copy_(product_goi)
        else:
            total_goi.add_(product_goi)


def load_grouped_package(name: PackageName) -> GroupedKernels:
    """Return the products of a package.

    Raises:
        ValueError: it is not installed, does not load, or lacks something.
    """
    home, function, arguments = _CALLED[name]
    try:
        multiply = getattr(import_module(home), function, None)
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(f"it does not load here ({error})") from error
    if name == "transformer_engine":
        known_version()
    if fault := fault_of_names({function: arguments}, {function: multiply}):
        raise ValueError(fault)
    assert multiply is not None
    given = arguments.split()
    if wants := [each for each in _required(multiply) if each not in given]:
        raise ValueError(f"its {function} also wants {', '.join(wants)}")
    return EngineGroups(multiply) if name == "transformer_engine" else GroupedGemm(multiply)


def _required(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a call must give."""
    arguments = signature(function).parameters.values()
    return [each.name for each in arguments if each.default is each.empty]


def _sizes(ends_g: Tensor) -> Tensor:
    """Return the number of rows of every group, int64 on the host."""
    assert ends_g.device.type == "cpu", "the host must know the ends"
    return ends_g.diff(prepend=ends_g.new_zeros(1)).long()


def _zero_unused_(out_goi: Tensor, counts_g: Tensor) -> None:
    """Zero the products of groups without rows, which a package may leave as they are."""
    for group in counts_g.eq(0).nonzero().flatten().tolist():
        out_goi[group].zero_()
