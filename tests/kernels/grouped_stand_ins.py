"""Stand-ins for the grouped products of two packages: their published signatures, in plain PyTorch.

``general_grouped_gemm`` is Transformer Engine's (2.10 to 2.20), ``gmm`` that of ``grouped_gemm``
(https://github.com/tgale96/grouped_gemm, and NVIDIA's fork). Groups without rows keep what was in
memory, for neither package promises zeros.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

CALLS: list[str] = []
"""The functions that were called, in their order."""


def general_grouped_gemm(
    A: list[Tensor],
    B: list[Tensor],
    out: list[Tensor],
    quantization_params: list[Any],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: list[Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output: bool = False,
) -> tuple[list[Tensor], Any, Any]:
    """Multiply as BLAS does, whose matrices lie by columns: op(B) op(A), for matrices by rows."""
    CALLS.append("general_grouped_gemm")
    assert not any((gelu, use_bias, use_split_accumulator))
    assert bias is D_dtype is None
    assert quantization_params == [None] * len(A)
    assert m_splits is not None
    assert all(type(size) is int for size in m_splits), "sizes are the host's"
    assert [len(rows) for rows in B] == m_splits
    assert out_dtype == out[0].dtype
    assert all(each.is_contiguous() for each in (*A, *B, *out))
    results: Sequence[Tensor] = out[0].split(m_splits) if single_output else out
    assert (single_output, grad) == {
        "TN": (True, False),
        "NN": (True, True),
        "NT": (False, True),
    }[layout]
    for left, right, result in zip(A, B, results, strict=True):
        if not left.numel() or not right.numel():
            continue
        first = right.T if layout[1] == "T" else right
        second = left.T if layout[0] == "T" else left
        product = first @ second if first.dtype == out_dtype else first.float() @ second.float()
        if accumulate:
            result.add_(product)
        else:
            result.copy_(product)
    return out, None, None


def gmm(
    a: Tensor,
    b: Tensor,
    batch_sizes: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    c: Tensor | None = None,
) -> Tensor:
    """Multiply the rows of every group, or with ``trans_a`` its columns."""
    CALLS.append("gmm")
    assert c is None
    assert not (trans_a and trans_b)
    assert batch_sizes.device.type == "cpu"
    assert batch_sizes.dtype == torch.int64
    assert a.dtype == b.dtype == torch.bfloat16
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert (a.dim(), b.dim()) == (2, 2 if trans_a else 3)
    assert len(a) > 0, "grids of no programs cannot be launched"
    sizes, groups = batch_sizes.tolist(), len(batch_sizes)
    if trans_a:
        out = a.new_full((groups, a.shape[1], b.shape[1]), torch.nan)
        parts = zip(out, a.split(sizes), b.split(sizes), strict=True)
    else:
        out = a.new_full((len(a), b.shape[1 if trans_b else 2]), torch.nan)
        parts = zip(out.split(sizes), a.split(sizes), b, strict=True)
    for result, left, right in parts:
        if len(left):
            result.copy_((left.T if trans_a else left) @ (right.T if trans_b else right))
    return out


@contextmanager
def installed(**changed: Any) -> Iterator[list[str]]:
    """Let both packages be there; yield the calls of their functions.

    Args:
        **changed: other functions; ``None``: missing.
    """
    functions = {"general_grouped_gemm": general_grouped_gemm, "gmm": gmm} | changed
    homes = {
        "transformer_engine": None,
        "transformer_engine.pytorch": None,
        "transformer_engine.pytorch.cpp_extensions": "general_grouped_gemm",
        "grouped_gemm": None,
        "grouped_gemm.backend": "gmm",
    }
    before = {name: sys.modules.get(name) for name in homes}
    CALLS.clear()
    try:
        for name, function in homes.items():
            sys.modules[name] = ModuleType(name)
            if function is not None and functions[function] is not None:
                setattr(sys.modules[name], function, functions[function])
        sys.modules["transformer_engine"].__dict__["__version__"] = "2.10.0"
        yield CALLS
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
