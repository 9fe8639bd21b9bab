"""The programs over many tensors at once as operators; see ``operators``.

Shapes: t tensors, k blocks, c columns of a table.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from megatron.kernels.cuda.library import Programs, operator
from megatron.kernels.cuda.operators import LAUNCH
from megatron.kernels.cuda.sizes import quotient

update = Programs("update")

BLOCK: Final = 512
"""Elements that a program of a step works on: 4 for each of 128 threads, which are 16 bytes in
fp32."""
SQUARES_BLOCK: Final = 4096
"""Elements whose squares a program adds up: it reads one tensor only, so each thread has more."""

_ALIGNMENT = 16  # bytes that a thread reads at once


def blocks_of(tensors: Sequence[Tensor]) -> int:
    """Return k, the number of sums that ``sums_of_squares`` forms of all tensors."""
    return sum(quotient(tensor.numel(), SQUARES_BLOCK) for tensor in tensors)


def _rows(*columns: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """Return a row for every tensor: five addresses, 0 where there is none, and its elements."""
    for column in columns:
        assert all(tensor.is_contiguous() for tensor in column)
        assert len({tensor.dtype for tensor in column}) <= 1
    addresses = [[tensor.data_ptr() for tensor in column] for column in columns]
    rows = range(len(columns[0]))
    padded = [*addresses, *([[0] * len(rows)] * (5 - len(addresses)))]
    return tuple(
        (*(column[row] if column else 0 for column in padded), columns[0][row].numel())
        for row in rows
    )


def _is_aligned(rows: tuple[tuple[int, ...], ...]) -> bool:
    return all(address % _ALIGNMENT == 0 for row in rows for address in row[:5])


@lru_cache(maxsize=1024)
def _tables(
    rows: tuple[tuple[int, ...], ...], kinds: tuple[int, ...], block: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Return the tables of tensors and of blocks on the device, and their copies on the host.

    ``block`` is the number of elements of a block. The tables are made when tensors are first used.
    The host does not wait until the device has them.
    """
    table_tc = torch.tensor([(*row, kind) for row, kind in zip(rows, kinds, strict=True)])
    counts_t = -(-table_tc[:, 5] // block)
    tensor_k = torch.repeat_interleave(torch.arange(len(rows)), counts_t)
    first_t = counts_t.cumsum(0) - counts_t
    blocks_k2 = torch.stack((tensor_k, torch.arange(len(tensor_k)) - first_t[tensor_k]), 1)
    own = table_tc, blocks_k2.contiguous()
    if device.type == "cuda":
        own = own[0].pin_memory(), own[1].pin_memory()
    return (*(each.to(device, non_blocking=True) for each in own), *own)


@operator(
    "adamw_(Tensor[] gradients, Tensor(a!)[] quotients, Tensor(b!)[] masters, "
    "Tensor(c!)[] moments, Tensor(d!)[] squares, Tensor(e!)[] weights, int[] kinds, "
    "float[] divisors, float lr, float vocabulary_lr, float decay, float beta1, float beta2, "
    "float epsilon, int number) -> ()"
)
def adamw_(
    gradients: Sequence[Tensor],
    quotients: Sequence[Tensor],
    masters: Sequence[Tensor],
    moments: Sequence[Tensor],
    squares: Sequence[Tensor],
    weights: Sequence[Tensor],
    kinds: Sequence[int],
    divisors: tuple[float, float],
    lr: float,
    vocabulary_lr: float,
    decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    number: int,
) -> None:
    """See ``programs.update``; without weights nothing is rounded.

    ``quotients`` are the gradients themselves if quotients replace them; otherwise it is empty.
    """
    rows = _rows(gradients, masters, moments, squares, weights)
    table_tc, blocks_k2, *_ = _tables(rows, tuple(kinds), BLOCK, masters[0].device)
    update.adamw[(len(blocks_k2),)](
        table_tc,
        blocks_k2,
        *divisors,
        lr,
        vocabulary_lr,
        decay,
        beta1,
        beta2,
        1 - beta1,
        1 - beta2,
        epsilon,
        1 - beta1**number,
        (1 - beta2**number) ** 0.5,
        GRADIENT=update.TYPES[gradients[0].dtype],
        MOMENT=update.TYPES[moments[0].dtype],
        SQUARE=update.TYPES[squares[0].dtype],
        WEIGHT=update.TYPES[weights[0].dtype if weights else masters[0].dtype],
        ROUNDS=len(weights) > 0,
        SCALES=len(quotients) > 0,
        ALIGNED=_is_aligned(rows),
        BLOCK=BLOCK,
        **LAUNCH,
    )


@operator("sums_of_squares(Tensor[] tensors, Tensor(a!) sums_k) -> ()")
def sums_of_squares(tensors: Sequence[Tensor], sums_k: Tensor) -> None:
    """See ``programs.update``."""
    rows = _rows(tensors)
    table_tc, blocks_k2, *_ = _tables(rows, (0,) * len(rows), SQUARES_BLOCK, sums_k.device)
    update.sums_of_squares[(len(blocks_k2),)](
        table_tc,
        blocks_k2,
        sums_k,
        GRADIENT=update.TYPES[tensors[0].dtype],
        ALIGNED=_is_aligned(rows),
        BLOCK=SQUARES_BLOCK,
        **LAUNCH,
    )
