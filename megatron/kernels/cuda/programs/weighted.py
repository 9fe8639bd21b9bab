"""Triton programs of an activation function times one weight per row, and of the gradients.

Arithmetic is fp32. Rows are slots: each has a choice of its own, which has the weight.

Shapes: r rows, c choices (at least r), f channels of the result; an inner row has f channels, or
with a gate 2 f, the gate first.
"""

import triton
import triton.language as tl

from megatron.kernels.cuda.programs.activations import gate_of, gelu_of


@triton.jit
def _plain(x, GELU: tl.constexpr):
    """Return value and slope of a function without a gate."""
    if GELU:
        value, slope = gelu_of(x)
    else:
        positive = tl.where(x < 0.0, 0.0, x)  # what is no number stays so
        value = positive * positive
        slope = 2.0 * positive
    return value, slope


@triton.jit
def weighted(
    out_rf,
    inner_rf,
    weights_c,
    choice_r,
    f,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``function(gate) * up * weight``, or without a gate ``function(x) * weight``."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < f
    weight = tl.load(weights_c + tl.load(choice_r + row))
    if GATED:
        first = inner_rf + 2 * row * f + channel
        value, _ = gate_of(tl.load(first, mask=inside, other=0.0).to(tl.float32), GELU)
        value *= tl.load(first + f, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(inner_rf + row * f + channel, mask=inside, other=0.0).to(tl.float32)
        value, _ = _plain(x, GELU)
    out = (value * weight).to(out_rf.dtype.element_ty)
    tl.store(out_rf + row * f + channel, out, mask=inside)


@triton.jit
def weighted_backward(
    inner_grad_rf,
    weights_grad_c,
    inner_rf,
    weights_c,
    choice_r,
    grad_rf,
    f,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of a row and of its weight, which is the sum of ``grad * function``."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_c + tl.load(choice_r + row))
    kind = inner_grad_rf.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for offset in range(0, f, BLOCK):
        channel = offset + tl.arange(0, BLOCK)
        inside = channel < f
        grad = tl.load(grad_rf + row * f + channel, mask=inside, other=0.0).to(tl.float32)
        scaled = grad * weight
        if GATED:
            first = 2 * row * f + channel
            gate = tl.load(inner_rf + first, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(inner_rf + first + f, mask=inside, other=0.0).to(tl.float32)
            value, slope = gate_of(gate, GELU)
            total += grad * value * up
            tl.store(inner_grad_rf + first, (scaled * up * slope).to(kind), mask=inside)
            tl.store(inner_grad_rf + first + f, (scaled * value).to(kind), mask=inside)
        else:
            place = row * f + channel
            x = tl.load(inner_rf + place, mask=inside, other=0.0).to(tl.float32)
            value, slope = _plain(x, GELU)
            total += grad * value
            tl.store(inner_grad_rf + place, (scaled * slope).to(kind), mask=inside)
    tl.store(weights_grad_c + tl.load(choice_r + row), tl.sum(total, 0))
