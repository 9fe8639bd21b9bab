"""Triton programs over many tensors at once: AdamW, and sums of squares.

A program works on a block of one tensor, which it finds by two tables. One has a row for every
tensor: addresses, number of elements, kind, first block. The other has the number of the tensor for
every block. So a step is one launch, and every tensor is read once and written once. Arithmetic is
fp32.

Shapes: t tensors, k blocks.
"""

import torch
import triton
import triton.language as tl

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Triton's names of the types that tensors of a step have."""

COLUMNS = tl.constexpr(8)
"""Of a tensor's row: gradient, master, first and second moment, rounded weight, elements, kind, and
the number of its first block."""


@triton.jit
def _at(table_tc, tensor, column: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(table_tc + tensor * COLUMNS + column).to(tl.pointer_type(KIND))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _first(table_tc, tensor, block, BLOCK: tl.constexpr):
    """Return the place in the tensor of the first element of a block."""
    return (block - tl.load(table_tc + tensor * COLUMNS + 7)) * BLOCK


@triton.jit
def adamw(
    table_tc,
    tensor_k,
    divisor,
    second_divisor,
    lr,
    vocabulary_lr,
    decay,
    beta1,
    beta2,
    left1,
    left2,
    epsilon,
    correction1,
    root_correction2,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    SQUARE: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROUNDS: tl.constexpr,
    SCALES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update masters and moments, and round the masters to the weights.

    The gradient is divided twice, and with ``SCALES`` the quotient stays in its place. ``left`` is
    1 - beta, ``correction`` 1 - beta^steps. A tensor's kind has two bits: 1, it decays; 2, its rate
    is that of the vocabulary layers.
    """
    block = tl.program_id(0)
    tensor = tl.load(tensor_k + block)
    place = _first(table_tc, tensor, block, BLOCK) + tl.arange(0, BLOCK)
    inside = place < tl.load(table_tc + tensor * COLUMNS + 5)
    kind = tl.load(table_tc + tensor * COLUMNS + 6)
    gradients = _at(table_tc, tensor, 0, GRADIENT, ALIGNED) + place
    masters = _at(table_tc, tensor, 1, tl.float32, ALIGNED) + place
    moments = _at(table_tc, tensor, 2, MOMENT, ALIGNED) + place
    squares = _at(table_tc, tensor, 3, SQUARE, ALIGNED) + place

    # rounded in between as if it had been stored, so that one pass and two give the same
    gradient = tl.load(gradients, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.div_rn(gradient, divisor).to(GRADIENT)
    gradient = tl.div_rn(gradient.to(tl.float32), second_divisor).to(GRADIENT)
    if SCALES:
        tl.store(gradients, gradient, mask=inside)
    gradient = gradient.to(tl.float32)
    master = tl.load(masters, mask=inside, other=0.0)
    moment = tl.load(moments, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(squares, mask=inside, other=0.0).to(tl.float32)

    rate = tl.where(kind >= 2, vocabulary_lr, lr)
    # Decoupled decay is of the old master (arXiv 1711.05101), so it precedes the update.
    master -= rate * tl.where(kind % 2 == 1, decay, 0.0) * master
    moment = beta1 * moment + left1 * gradient
    square = beta2 * square + left2 * gradient * gradient
    master -= rate / correction1 * moment / (tl.sqrt(square) / root_correction2 + epsilon)

    tl.store(masters, master, mask=inside)
    tl.store(moments, moment.to(MOMENT), mask=inside)
    tl.store(squares, square.to(SQUARE), mask=inside)
    if ROUNDS:
        weights = _at(table_tc, tensor, 4, WEIGHT, ALIGNED) + place
        tl.store(weights, master.to(WEIGHT), mask=inside)


@triton.jit
def sums_of_squares(
    table_tc,
    tensor_k,
    sums_k,
    GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum up the squares of every block of the gradients.

    A load without a mask is as wide as a thread can read, so only a tensor's last block has one.
    """
    block = tl.program_id(0)
    tensor = tl.load(tensor_k + block)
    first = _first(table_tc, tensor, block, BLOCK)
    elements = tl.load(table_tc + tensor * COLUMNS + 5)
    place = first + tl.arange(0, BLOCK)
    gradients = _at(table_tc, tensor, 0, GRADIENT, ALIGNED) + place
    if first + BLOCK <= elements:
        gradient = tl.load(gradients)
    else:
        gradient = tl.load(gradients, mask=place < elements, other=0.0)
    gradient = gradient.to(tl.float32)
    tl.store(sums_k + block, tl.sum(gradient * gradient, 0))
