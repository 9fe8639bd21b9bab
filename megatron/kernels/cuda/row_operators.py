"""The programs of norms, activations and rotations as operators; see ``operators``.

Shapes: r rows, h or f their length, k spans of rows; b batch, s sequence, a heads, d channels of a
head, p rotated pairs.
"""

from typing import Final

import torch
from torch import Tensor

from megatron.kernels.cuda.library import Programs, operator
from megatron.kernels.cuda.operators import BLOCK, LAUNCH, TILE, over_rows
from megatron.kernels.cuda.sizes import next_power_of_2, quotient

activations = Programs("activations")
norms = Programs("norms")
rotation = Programs("rotation")

WIDEST_ROW: Final = 8192
"""Longest row for the backward of a norm: one program keeps the whole row in registers."""

ACTIVATION_SPAN: Final = 64
"""Rows over which one program adds up the gradient of a bias."""

_LEAST_SPAN, _MOST_SPANS = 16, 512

SUMS: Final = {"ROWS": 128, "COLUMNS": 32, "num_warps": 8}
"""Tile in which spans are added up. A narrow one makes many programs: an H200 took 9.6 us for 256
spans of 4,096 columns, and 18.3 us in tiles of 16 x 128."""

_WIDEST_OF_3_STAGES: Final = 16384
"""Bytes of the longest row of which two stages of three tensors fit into any GPU's 99 KiB."""


def as_rows(x: Tensor) -> Tensor:
    """[..., h] -> [r, h]; each row is dense, and there may be gaps between rows."""
    x_rh = x.reshape(-1, x.shape[-1])
    return x_rh if x_rh.stride(1) == 1 else x_rh.contiguous()


def norm_tile(h: int, number_bytes: int) -> dict[str, int]:
    """Return the rows and columns that a program works on at a time, and its warps.

    A thread has 32 bytes of a row, so that the longest row of fp32 does not exceed its registers.
    """
    columns = next_power_of_2(h)
    rows = max(1, BLOCK // columns)
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": max(4, columns * number_bytes // 1024)}


def norm_backward_tile(h: int, number_bytes: int) -> dict[str, int]:
    """Return the tile of a program of the backward, its warps, and its stages of shared memory.

    A thread has 32 bytes of a row of each tensor. An H200 took 50.1 us with 16 bytes, 42.9 with 32
    and 57.9 with 64 for 4,096 rows of 4,096 numbers in 16 bits.
    """
    columns = next_power_of_2(h)
    row = columns * number_bytes
    return {
        "ROWS": max(1, BLOCK // columns),
        "COLUMNS": columns,
        "STAGES": 3 if row <= _WIDEST_OF_3_STAGES else 2,
        "num_warps": min(16, max(4, row // 1024)),
    }


def norm_span(r: int, h: int) -> int:
    """Return how many rows one Triton program of a norm's backward goes through."""
    return max(_LEAST_SPAN, quotient(r, _MOST_SPANS), norm_tile(h, 1)["ROWS"])


def rotation_tile(channels: int, pairs: int) -> dict[str, int]:
    """Return the heads, pairs and other channels that a program works on."""
    width = next_power_of_2(pairs)
    others = channels - 2 * pairs
    return {
        "HEADS": max(1, BLOCK // (2 * width)),
        "PAIRS": width,
        "OTHERS": next_power_of_2(others) if others else 0,
    }


@operator(
    "norm(Tensor(a!) out, Tensor(b!)? total, Tensor(c!) statistics_2r, Tensor x_rh, "
    "Tensor? part, Tensor weight_h, Tensor? bias_h, float epsilon) -> ()"
)
def norm(
    out: Tensor,
    total: Tensor | None,
    statistics_2r: Tensor,
    x_rh: Tensor,
    part: Tensor | None,
    weight_h: Tensor,
    bias_h: Tensor | None,
    epsilon: float,
) -> None:
    """See ``programs.norms``; LayerNorm with a bias, else RMSNorm.

    Contiguous tensors may have any leading dimensions.
    """
    r, h = x_rh.shape
    tile = norm_tile(h, x_rh.element_size())
    norms.norm[(quotient(r, tile["ROWS"]),)](
        out,
        out if total is None else total,
        statistics_2r,
        x_rh,
        x_rh if part is None else part,
        weight_h,
        weight_h if bias_h is None else bias_h,
        r,
        h,
        x_rh.stride(0),
        epsilon,
        CENTRED=bias_h is not None,
        ADDS=part is not None,
        **{**LAUNCH, **tile},
    )


@operator(
    "norm_backward(Tensor(a!) x_grad, Tensor(b!) partial_jkh, Tensor x_rh, Tensor weight_h, "
    "Tensor statistics_2r, Tensor grad, Tensor? stream_grad) -> ()"
)
def norm_backward(
    x_grad: Tensor,
    partial_jkh: Tensor,
    x_rh: Tensor,
    weight_h: Tensor,
    statistics_2r: Tensor,
    grad: Tensor,
    stream_grad: Tensor | None,
) -> None:
    """See ``programs.norms``; LayerNorm if ``partial_jkh`` has two sums, else RMSNorm.

    Contiguous tensors may have any leading dimensions.
    """
    r, h = x_rh.shape
    norms.norm_backward[(partial_jkh.shape[1],)](
        x_grad,
        partial_jkh,
        x_rh,
        weight_h,
        statistics_2r,
        grad,
        grad if stream_grad is None else stream_grad,
        r,
        h,
        x_rh.stride(0),
        norm_span(r, h),
        CENTRED=partial_jkh.shape[0] == 2,
        STREAM=stream_grad is not None,
        **{**LAUNCH, **norm_backward_tile(h, x_rh.element_size())},
    )


@operator("column_sums(Tensor(a!) sums_jh, Tensor partial_jkh) -> ()")
def column_sums(sums_jh: Tensor, partial_jkh: Tensor) -> None:
    """See ``programs.norms``."""
    j, k, h = partial_jkh.shape
    norms.column_sums[(quotient(h, SUMS["COLUMNS"]), j)](
        sums_jh, partial_jkh, k, h, **{**LAUNCH, **SUMS}
    )


@operator("activation(Tensor(a!) out, Tensor x, bool gelu) -> ()")
def activation(out: Tensor, x: Tensor, gelu: bool) -> None:
    """See ``programs.activations``; GELU or ``relu(x)^2``."""
    assert x.is_contiguous()
    activations.activation[(quotient(x.numel(), BLOCK),)](
        out, x, x.numel(), GELU=gelu, BLOCK=BLOCK, **LAUNCH
    )


@operator(
    "activation_backward(Tensor(a!) x_grad, Tensor(b!)? partial_kf, Tensor kept, Tensor grad, "
    "bool gelu) -> ()"
)
def activation_backward(
    x_grad: Tensor, partial_kf: Tensor | None, kept: Tensor, grad: Tensor, gelu: bool
) -> None:
    """See ``programs.activations``; all are [..., f]; ``partial_kf`` is ``None`` without a bias."""
    f = kept.shape[-1]
    r = kept.numel() // f
    grid = quotient(f, TILE["COLUMNS"]), quotient(r, ACTIVATION_SPAN)
    activations.activation_backward[grid](
        x_grad,
        x_grad if partial_kf is None else partial_kf,
        kept,
        grad,
        r,
        f,
        GELU=gelu,
        BIAS=partial_kf is not None,
        SPAN=ACTIVATION_SPAN,
        **TILE,
        **LAUNCH,
    )


@operator("gated(Tensor(a!) out_rf, Tensor gate_up_rf, bool gelu) -> ()")
def gated(out_rf: Tensor, gate_up_rf: Tensor, gelu: bool) -> None:
    """See ``programs.activations``; the gate's function is GELU or silu."""
    assert gate_up_rf.is_contiguous()
    activations.gated[over_rows(out_rf)](
        out_rf, gate_up_rf, out_rf.shape[1], GELU=gelu, BLOCK=BLOCK, **LAUNCH
    )


@operator(
    "gated_backward(Tensor(a!) gate_up_grad_rf, Tensor gate_up_rf, Tensor grad_rf, bool gelu) -> ()"
)
def gated_backward(
    gate_up_grad_rf: Tensor, gate_up_rf: Tensor, grad_rf: Tensor, gelu: bool
) -> None:
    """See ``programs.activations``."""
    assert gate_up_grad_rf.is_contiguous()
    assert gate_up_rf.is_contiguous()
    activations.gated_backward[over_rows(grad_rf)](
        gate_up_grad_rf, gate_up_rf, grad_rf, grad_rf.shape[1], GELU=gelu, BLOCK=BLOCK, **LAUNCH
    )


@operator(
    "rotate(Tensor(a!) out_bsad, Tensor x_bsad, Tensor cos, Tensor sin, bool interleaved, "
    "bool back) -> ()"
)
def rotate(
    out_bsad: Tensor, x_bsad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
) -> None:
    """See ``programs.rotation``; the angles are [s, 1, p], or [b or 1, s, 1, p] by sample."""
    b, s, a, d = out_bsad.shape
    p = cos.shape[-1]
    tile = rotation_tile(d, p)
    assert x_bsad.stride(3) == cos.stride(-1) == 1
    assert cos.stride() == sin.stride()
    by_sample = cos.dim() == 4 and len(cos) > 1
    assert not by_sample or len(cos) == b
    rotation.rotate[(b * s, quotient(a, tile["HEADS"]))](
        out_bsad,
        x_bsad,
        cos,
        sin,
        s,
        a,
        d,
        p,
        *x_bsad.stride()[:3],
        cos.stride(0) if by_sample else 0,
        cos.stride(-3),
        BACK=back,
        INTERLEAVED=interleaved,
        **tile,
        **LAUNCH,
    )


def turn(x_bsad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """As ``reference.rotation.Turn``, by one kernel."""
    if x_bsad.stride(3) != 1:
        x_bsad = x_bsad.contiguous()
    out_bsad = torch.empty(x_bsad.shape, dtype=x_bsad.dtype, device=x_bsad.device)
    rotate(out_bsad, x_bsad, cos, sin, interleaved, back)
    return out_bsad
