"""Triton programs of activations; without a gate they also form the gradient of a bias.

The two halves of a gated activation's input lie side by side in the last dimension, the gate first.
Arithmetic is fp32.

Shapes: r rows, f channels of the result, k spans of rows.
"""

import triton
import triton.language as tl


@triton.jit
def gelu_of(x):
    """Return value and slope of GELU by its tanh approximation."""
    # (1 + tanh(u / 2)) / 2 is the sigmoid of u
    inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    sigmoid = 1.0 / (1.0 + tl.exp(-inner))
    return x * sigmoid, sigmoid + x * sigmoid * (1.0 - sigmoid) * slope


@triton.jit
def activation(out_n, x_n, n, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """GELU, or the square of ReLU."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    x = tl.load(x_n + place, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        out, _ = gelu_of(x)
    else:
        out = tl.where(x < 0.0, 0.0, x)  # what is no number stays so
        out *= out
    tl.store(out_n + place, out.to(out_n.dtype.element_ty), mask=inside)


@triton.jit
def activation_backward(
    x_grad_rf,
    partial_kf,
    kept_rf,
    grad_rf,
    r,
    f,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Form the gradient of the input and, if wanted, its sums over every span of rows.

    ``kept`` is the input of GELU, and the output of the square.
    """
    part = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    kind = x_grad_rf.dtype.element_ty
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for offset in range(0, SPAN, ROWS):
        row = part * SPAN + offset + tl.arange(0, ROWS)
        here = (row < r)[:, None] & (column < f)[None, :]
        place = row[:, None] * f + column[None, :]
        kept = tl.load(kept_rf + place, mask=here, other=0.0).to(tl.float32)
        grad = tl.load(grad_rf + place, mask=here, other=0.0).to(tl.float32)
        if GELU:
            _, slope = gelu_of(kept)
        else:  # the root of a square that was rounded is the number itself, once it is rounded too
            slope = 2.0 * tl.sqrt(kept).to(kind).to(tl.float32)
        x_grad = grad * slope
        total += x_grad
        tl.store(x_grad_rf + place, x_grad.to(kind), mask=here)
    if BIAS:
        tl.store(partial_kf + part * f + column, tl.sum(total, 0), mask=column < f)


@triton.jit
def gate_of(x, GELU: tl.constexpr):
    """Return the gate's value and slope: silu, or GELU by its tanh approximation."""
    if GELU:
        value, slope = gelu_of(x)
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        value = x * sigmoid
        slope = sigmoid + x * sigmoid * (1.0 - sigmoid)
    return value, slope


@triton.jit
def gated(out_rf, gate_up_rf, f, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """``function(gate) * up``."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < f
    gate = tl.load(gate_up_rf + 2 * row * f + channel, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_rf + (2 * row + 1) * f + channel, mask=inside, other=0.0).to(tl.float32)
    value, _ = gate_of(gate, GELU)
    tl.store(out_rf + row * f + channel, (value * up).to(out_rf.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(
    gate_up_grad_rf, gate_up_rf, grad_rf, f, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the gradients of gate and up to their halves of ``gate_up_grad_rf``."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < f
    first = 2 * row * f + channel
    gate = tl.load(gate_up_rf + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_rf + first + f, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_rf + row * f + channel, mask=inside, other=0.0).to(tl.float32)
    value, slope = gate_of(gate, GELU)
    kind = gate_up_grad_rf.dtype.element_ty
    tl.store(gate_up_grad_rf + first, (grad * up * slope).to(kind), mask=inside)
    tl.store(gate_up_grad_rf + first + f, (grad * value).to(kind), mask=inside)
