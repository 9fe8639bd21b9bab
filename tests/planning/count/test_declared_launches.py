"""A kernel declares its launch beside its schema, and the count does not know its name."""

import ast
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from planning.count.test_launches_by_hand import launched, made
from torch import Tensor
from torch._ops import OpOverloadPacket

from megatron.kernels.counted import counted_kernels
from megatron.kernels.cuda import (
    block_products,
    eight_bits,
    grouped,
    grouped_eight_bits,
    microscaling,
)
from megatron.kernels.cuda.library import operator
from megatron.kernels.declared import Sizes, multiplies, overwrites, touches_rows
from megatron.kernels.eight_bits import E4M3
from megatron.kernels.microscaling import SCALE
from megatron.planning.count import launches, recorder
from megatron.simulator.costs import launch_time
from megatron.simulator.costs.count import Product, Quickness

FP32 = torch.float32
ROWS, GROUPS, INPUTS, OUTPUTS = 48, 2, 32, 64
ENDS = made(GROUPS, dtype=torch.int32)
ALL = 2 * ROWS * INPUTS * OUTPUTS
"""FLOPs of the product of all rows: two for each pair of numbers that meet."""


def eight(*shape: int) -> Tensor:
    return made(*shape, dtype=E4M3)


def worth(*shape: int) -> Tensor:
    return made(*shape, dtype=FP32)


TURNED_BY_TENSOR = ROWS + 16 * GROUPS
"""Columns of turned rows: a gap of 16 behind each group."""
TURNED_BY_BLOCK = ROWS + 128 * (GROUPS - 1)
"""Columns of turned rows: a gap of 128 between groups."""

PRODUCTS: dict[str, tuple[Callable[[], object], Product]] = {
    "grouped": (
        lambda: grouped.grouped_product(
            made(ROWS, OUTPUTS), made(ROWS, INPUTS), made(GROUPS, INPUTS, OUTPUTS), ENDS
        ),
        Product(ROWS // GROUPS, OUTPUTS, INPUTS, GROUPS),
    ),
    "weights of groups": (
        lambda: grouped.add_grouped_weight_product_(
            worth(GROUPS, OUTPUTS, INPUTS), made(ROWS, OUTPUTS), made(ROWS, INPUTS), ENDS
        ),
        Product(OUTPUTS, INPUTS, ROWS // GROUPS, GROUPS),
    ),
    "8 bits": (
        lambda: eight_bits.eight_bit_product(
            made(ROWS, OUTPUTS),
            eight(ROWS, INPUTS),
            worth(),
            eight(OUTPUTS, INPUTS),
            worth(),
            None,
            False,
        ),
        Product(ROWS, OUTPUTS, INPUTS),
    ),
    "8 bits of groups": (
        lambda: grouped_eight_bits.grouped_eight_bit_product(
            made(ROWS, OUTPUTS),
            eight(ROWS, INPUTS),
            worth(GROUPS),
            eight(GROUPS, OUTPUTS, INPUTS),
            worth(GROUPS),
            ENDS,
            False,
        ),
        Product(ROWS // GROUPS, OUTPUTS, INPUTS, GROUPS),
    ),
    "weights in 8 bits of groups": (
        lambda: grouped_eight_bits.add_grouped_eight_bit_weight_product_(
            worth(GROUPS, OUTPUTS, INPUTS),
            eight(OUTPUTS, TURNED_BY_TENSOR),
            worth(GROUPS),
            eight(INPUTS, TURNED_BY_TENSOR),
            worth(GROUPS),
            ENDS,
        ),
        Product(OUTPUTS, INPUTS, ROWS // GROUPS, GROUPS),
    ),
    "blocks": (
        lambda: block_products.block_product(
            made(ROWS, OUTPUTS),
            eight(ROWS, INPUTS),
            worth(1, ROWS),
            eight(OUTPUTS, INPUTS),
            worth(1, 1),
            None,
        ),
        Product(ROWS, OUTPUTS, INPUTS),
    ),
    "blocks of groups": (
        lambda: block_products.grouped_block_product(
            made(ROWS, OUTPUTS),
            eight(ROWS, INPUTS),
            worth(1, ROWS),
            eight(GROUPS, OUTPUTS, INPUTS),
            worth(GROUPS, 1, 1),
            None,
            ENDS,
        ),
        Product(ROWS // GROUPS, OUTPUTS, INPUTS, GROUPS),
    ),
    "a weight in blocks by cuBLAS": (
        lambda: block_products.block_weight_product(
            worth(OUTPUTS, INPUTS),
            eight(OUTPUTS, ROWS),
            worth(1, OUTPUTS),
            eight(INPUTS, ROWS),
            worth(1, INPUTS),
        ),
        Product(OUTPUTS, INPUTS, ROWS),
    ),
    "a scale for every 32 numbers": (
        lambda: microscaling.mx_product(
            made(ROWS, OUTPUTS),
            eight(ROWS, INPUTS),
            made(512, dtype=SCALE),
            eight(OUTPUTS, INPUTS),
            made(512, dtype=SCALE),
            None,
        ),
        Product(ROWS, OUTPUTS, INPUTS),
    ),
    "weights in blocks of groups": (
        lambda: block_products.add_grouped_block_weight_product_(
            worth(GROUPS, OUTPUTS, INPUTS),
            eight(OUTPUTS, TURNED_BY_BLOCK),
            worth(1, OUTPUTS),
            eight(INPUTS, TURNED_BY_BLOCK),
            worth(1, INPUTS),
            ENDS,
        ),
        Product(OUTPUTS, INPUTS, ROWS // GROUPS, GROUPS),
    ),
}


BY_CUBLAS: dict[str, Quickness] = {
    "8 bits": "8 bits",
    "blocks": "8 bits by blocks",
    "a scale for every 32 numbers": "MXFP8",
    "a weight in blocks by cuBLAS": "8-bit weight gradients by blocks",
}
"""The products in 8 bits that are not Triton programs, as quick as 16 bits."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_this_project_is_what_a_hand_counts(name: str) -> None:
    call, product = PRODUCTS[name]
    [launch] = launched(call)
    assert (launch.flops, launch.executed, launch.product) == (ALL, ALL, product)
    assert launch.quickness == BY_CUBLAS.get(name, "16 bits")


def test_a_rounding_moves_the_matrix_once_and_both_results() -> None:
    """96 x 64 numbers: 2 bytes read, 1 written by rows and 1 by columns, and a tile of scales."""
    kernels = counted_kernels(torch.bfloat16)
    [launch] = launched(lambda: kernels.quantise_mx(made(96, 64), E4M3, straight=True, turned=True))
    assert (launch.name, launch.flops) == ("quantise_mx", 0)
    assert launch.bytes == 96 * 64 * (2 + 1 + 1) + 2 * 128 * 4


@operator(
    "_test_of_declared_products(Tensor(a!) out_mn, Tensor left_mk, Tensor right_nk) -> ()",
    lambda left_mk, right_nk, **_: multiplies(
        Sizes(len(left_mk), len(right_nk), left_mk.shape[1]), "8 bits"
    ),
)
def multiply(out_mn: Tensor, left_mk: Tensor, right_nk: Tensor) -> None:
    raise AssertionError("it has values")


@operator(
    "_test_of_declared_rows(Tensor(a!) out_nh, Tensor table_vh, Tensor ids_n) -> ()",
    touches_rows("table_vh", "ids_n"),
)
def look_up(out_nh: Tensor, table_vh: Tensor, ids_n: Tensor) -> None:
    raise AssertionError("it has values")


@operator("_test_of_declared_writing_(Tensor(a!)[] out, Tensor(b!) sum) -> ()", overwrites("out"))
def write_(out: list[Tensor], sum: Tensor) -> None:
    raise AssertionError("it has values")


def test_a_new_kernel_is_counted_by_its_own_declaration() -> None:
    left, right = made(3, 5), made(7, 5)
    [product] = launched(lambda: multiply(made(3, 7), left, right))
    assert product.name == "_test_of_declared_products"
    assert product.product == Product(3, 7, 5)
    assert product.flops == product.executed == 2 * 3 * 5 * 7
    assert product.bytes == (3 * 7 + 3 * 5 + 7 * 5) * 2
    assert product.quickness == "8 bits"

    [rows] = launched(lambda: look_up(made(3, 8), made(100, 8), made(3, dtype=torch.int64)))
    assert rows.bytes == (3 * 8 + 3 * 8) * 2 + 3 * 8

    [written] = launched(lambda: write_([made(4)], made(6)))
    assert written.bytes == (4 + 2 * 6) * 2, "the sum is read and written"


@pytest.mark.parametrize("module", [launches, recorder, launch_time])
def test_the_count_names_no_operator_of_a_kernel(module: ModuleType) -> None:
    space = torch.ops.megatron_kernels
    names = {name for name in dir(space) if isinstance(getattr(space, name), OpOverloadPacket)}
    assert "grouped_block_product" in names
    assert module.__file__ is not None
    nodes = ast.walk(ast.parse(Path(module.__file__).read_text()))
    assert not {node.value for node in nodes if isinstance(node, ast.Constant)} & names
