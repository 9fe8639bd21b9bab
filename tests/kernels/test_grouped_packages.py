"""Products of groups by other packages are those of a loop over the groups."""

import sys
from typing import Any

import pytest
import torch
from kernels.grouped_stand_ins import installed

from megatron.kernels.cuda.grouped_packages import PackageName, load_grouped_package
from megatron.kernels.grouped import product_by_group, weight_product_by_group

CASES = [("transformer_engine", torch.bfloat16), ("transformer_engine", torch.float32)]
CASES += [("grouped_gemm", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("sizes", [(3, 0, 4, 0), (0, 0, 0, 0)], ids=str)
def test_packages_multiply_as_a_loop_does(
    name: PackageName, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    ends_g = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x_si, grad_so, weight_goi = made(sum(sizes), 5), made(sum(sizes), 6), made(len(sizes), 6, 5)
    with installed() as calls:
        package = load_grouped_package(name)
        for rows, weight in ((x_si, weight_goi.transpose(1, 2)), (grad_so, weight_goi)):
            own = package.grouped_product(rows, weight, ends_g)
            assert torch.equal(own, product_by_group(rows, weight, ends_g))
        wanted_goi = weight_product_by_group(grad_so, x_si, ends_g)
        assert torch.equal(package.grouped_weight_product(grad_so, x_si, ends_g), wanted_goi)
        total_goi = torch.full(wanted_goi.shape, torch.nan)
        package.accumulate_grouped_product_(total_goi, grad_so, x_si, ends_g, begins=True)
        once = total_goi.clone()
        package.accumulate_grouped_product_(total_goi, grad_so, x_si, ends_g, begins=False)
    assert bool(calls) == any(sizes)
    assert torch.equal(total_goi, once + once)
    wide_goi = weight_product_by_group(grad_so.float(), x_si.float(), ends_g)
    rounded = name == "grouped_gemm"
    torch.testing.assert_close(once, wanted_goi.float() if rounded else wide_goi)


def other_arguments(A: Any, B: Any, out: Any, workspaces: Any) -> None:
    """A version of the function that is not known."""


def more_arguments(
    A: Any,
    B: Any,
    out: Any,
    quantization_params: Any,
    out_dtype: Any,
    workspaces: Any,
    layout: str = "TN",
    m_splits: Any = None,
    grad: bool = False,
    accumulate: bool = False,
    single_output: bool = False,
) -> None:
    """Another version of the function that is not known."""


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("transformer_engine", {"general_grouped_gemm": more_arguments}, "also wants workspaces"),
        ("transformer_engine", {"general_grouped_gemm": None}, "general_grouped_gemm is missing"),
        ("transformer_engine", {"general_grouped_gemm": other_arguments}, "has no quantization"),
        ("grouped_gemm", {"gmm": None}, "gmm is missing"),
    ],
)
def test_a_package_that_lacks_something_is_refused(
    name: PackageName, changed: dict[str, Any], words: str
) -> None:
    with installed(**changed), pytest.raises(ValueError, match=words):
        load_grouped_package(name)


@pytest.mark.parametrize("name", ["transformer_engine", "grouped_gemm"])
def test_a_package_that_is_not_installed_is_refused(
    name: PackageName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match="it does not load here"):
        load_grouped_package(name)
