"""Joins the outputs of a column-parallel layer that has no row-parallel layer after it.

Shapes: b batch, s tokens of a sequence, u tokens of it that a rank has, c outputs of a rank, h
outputs of all ranks of the tensor axis.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, once_differentiable
from megatron.parallel.tensor import TensorParallel


def join_columns(part_bsc: Tensor, tensor: TensorParallel) -> Tensor:
    """Return all outputs [b, u, h] for the tokens that this rank has.

    Args:
        part_bsc: this rank's outputs, for all tokens.
        tensor: the ranks that share the layer; the outputs of rank 0 come first.
    """
    return part_bsc if tensor.size == 1 else apply(_Join, part_bsc, tensor)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_bsc: Tensor, tensor: TensorParallel) -> Tensor:
        ctx.tensor = tensor
        whole_bsh = tensor.all_gather(part_bsc.contiguous()).movedim(0, 2).flatten(2)
        return tensor.own_tokens(whole_bsh).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_buh: Tensor) -> tuple[Tensor, None]:
        tensor = ctx.tensor
        return tensor.gather(grad_buh.contiguous()).chunk(tensor.size, dim=-1)[tensor.rank], None
