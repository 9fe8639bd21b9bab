"""Triton programs of gated activations: the function of the gate, times the other half.

The halves lie side by side in the last dimension, the gate first. Arithmetic is fp32 or, for
float64, wider.

Shapes: r rows, f channels of a half.
"""

import triton
import triton.language as tl


@triton.jit
def _gate(x, GELU: tl.constexpr):
    """Return the gate's value and slope: silu, or GELU by its tanh approximation."""
    inner = x
    inner_slope = x * 0.0 + 1.0
    if GELU:  # (1 + tanh(u / 2)) / 2 is the sigmoid of u
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        inner_slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    sigmoid = 1.0 / (1.0 + tl.exp(-inner))
    return x * sigmoid, sigmoid + x * sigmoid * (1.0 - sigmoid) * inner_slope


@triton.jit
def gated(out_rf, gate_up_rf, f, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """``function(gate) * up``."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < f
    gate = tl.load(gate_up_rf + 2 * row * f + channel, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_rf + (2 * row + 1) * f + channel, mask=inside, other=0.0).to(tl.float32)
    value, _ = _gate(gate, GELU)
    tl.store(out_rf + row * f + channel, (value * up).to(out_rf.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(
    gate_up_grad_rf, gate_up_rf, grad_rf, f, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradients of both halves, where they belong."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < f
    first = 2 * row * f + channel
    gate = tl.load(gate_up_rf + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_rf + first + f, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_rf + row * f + channel, mask=inside, other=0.0).to(tl.float32)
    value, slope = _gate(gate, GELU)
    kind = gate_up_grad_rf.dtype.element_ty
    tl.store(gate_up_grad_rf + first, (grad * up * slope).to(kind), mask=inside)
    tl.store(gate_up_grad_rf + first + f, (grad * value).to(kind), mask=inside)
