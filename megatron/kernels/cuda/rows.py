"""Rows added to the rows of a sum on a GPU: the gradient of the input embedding.

PyTorch sorts the ids. Then one program adds up all rows of an id, so that no two programs write to
one row of the sum, and the same run gives the same bits.

Shapes: v rows of a shard, n tokens, h hidden size.
"""

from typing import Final

from torch import Tensor

from megatron.kernels.cuda.library import Programs, operator
from megatron.kernels.cuda.operators import BLOCK, LAUNCH
from megatron.kernels.cuda.sizes import quotient
from megatron.kernels.declared import touches_rows

programs = Programs("rows")

RUN: Final = 8
"""Rows with the same id that a program reads at a time."""


@operator(
    "add_rows_(Tensor(a!) total_vh, Tensor sorted_n, Tensor order_n, Tensor x_nh, int first_row) "
    "-> ()",
    touches_rows("total_vh", "sorted_n"),
)
def add_rows_(
    total_vh: Tensor, sorted_n: Tensor, order_n: Tensor, x_nh: Tensor, first_row: int
) -> None:
    """See ``programs.rows``."""
    assert total_vh.is_contiguous()
    assert x_nh.is_contiguous()
    n, h = x_nh.shape
    programs.add_rows[(n, quotient(h, BLOCK))](
        total_vh,
        sorted_n,
        order_n,
        x_nh,
        n,
        len(total_vh),
        h,
        first_row,
        RUN=RUN,
        BLOCK=BLOCK,
        **LAUNCH,
    )


class CudaRows:
    """The part of ``Kernels`` that adds to rows."""

    def add_rows_(self, total_vh: Tensor, ids_n: Tensor, x_nh: Tensor, first_row: int) -> None:
        """See ``Kernels``."""
        sorted_n, order_n = ids_n.sort(stable=True)
        add_rows_(total_vh, sorted_n, order_n, x_nh.contiguous(), first_row)
