"""The programs over many tensors at once as operators; see ``operators``.

Shapes: t tensors, k blocks, c columns of the table of tensors.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from megatron.kernels.cuda.library import Programs, operator
from megatron.kernels.cuda.operators import LAUNCH
from megatron.kernels.cuda.sizes import quotient
from megatron.kernels.declared import overwrites

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


def _blocks(rows: tuple[tuple[int, ...], ...], block: int) -> tuple[int, ...]:
    """Return the number of blocks of each tensor."""
    return tuple(quotient(row[5], block) for row in rows)


def _is_aligned(rows: tuple[tuple[int, ...], ...]) -> bool:
    return all(address % _ALIGNMENT == 0 for row in rows for address in row[:5])


@lru_cache(maxsize=1024)
def _tables(
    rows: tuple[tuple[int, ...], ...], kinds: tuple[int, ...], block: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the table of tensors, and the number of the tensor of every block, on the device.

    ``block`` is the number of elements of a block. The second table takes 4 bytes a block. Tensors
    of equal sizes share it. The table of tensors is made when they are first used.
    """
    blocks = _blocks(rows, block)
    first = (0, *accumulate(blocks))[:-1]
    whole = zip(rows, kinds, first, strict=True)
    table_tc = _on_device(torch.tensor([(*row, *further) for row, *further in whole]), device)
    return table_tc, _tensor_of_block(blocks, device)


@lru_cache(maxsize=64)
def _tensor_of_block(blocks: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the number of each block's tensor on the device.

    Args:
        blocks: the number of blocks of each tensor.
        device: of the tensors.
    """
    numbers_t = torch.arange(len(blocks), dtype=torch.int32)
    return _on_device(torch.repeat_interleave(numbers_t, torch.tensor(blocks)), device)


def _on_device(made: Tensor, device: torch.device) -> Tensor:
    """Return ``made`` on the device; the host does not wait until it has arrived there.

    PyTorch keeps pinned memory of the host from being used again before that.
    """
    if device.type == "cuda":
        made = made.pin_memory()
    return made.to(device, non_blocking=True)


@operator(
    "adamw_(Tensor[] gradients, Tensor(a!)[] quotients, Tensor(b!)[] masters, "
    "Tensor(c!)[] moments, Tensor(d!)[] squares, Tensor(e!)[] weights, int[] kinds, "
    "float[] divisors, float lr, float vocabulary_lr, float decay, float beta1, float beta2, "
    "float epsilon, int number) -> ()",
    overwrites("quotients", "weights"),
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
    table_tc, tensor_k = _tables(rows, tuple(kinds), BLOCK, masters[0].device)
    update.adamw[(len(tensor_k),)](
        table_tc,
        tensor_k,
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
    table_tc, tensor_k = _tables(rows, (0,) * len(rows), SQUARES_BLOCK, sums_k.device)
    update.sums_of_squares[(len(tensor_k),)](
        table_tc,
        tensor_k,
        sums_k,
        GRADIENT=update.TYPES[tensors[0].dtype],
        ALIGNED=_is_aligned(rows),
        BLOCK=SQUARES_BLOCK,
        **LAUNCH,
    )
