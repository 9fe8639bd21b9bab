"""W of two microbatches as one product over the tokens of both, beside two products.

Both add to the sum of a weight's gradient, in fp32. One product reads and writes that sum once, and
its tiles work longer, but both microbatches must lie one behind the other in memory. *Copied*: one
product, with the copies that bring them there.

Shapes: n tokens of a microbatch, i inputs and o outputs of a linear layer.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from megatron.kernels.choose import kernels_for
from megatron.kernels.face import Kernels
from tools.gpu_sections.timing import Scale, Section, in_a_line, laps, table

LAYERS: Final = {
    "queries, keys, values": (8192, 1280),
    "attention's output": (1024, 8192),
    "gate and up": (8192, 7168),
    "down": (3584, 8192),
    "gate and up, t = 1": (4096, 28672),
}
"""Inputs and outputs of layers: those of Llama 3 70B on 8 tensor-parallel ranks, and of 8B."""

TOKENS: Final = (1024, 2048, 4096, 8192)

_HEAD: Final = (
    "layer", "n", "two products, us", "TFLOP/s", "one product / two", "copied / two",
)  # fmt: skip


def measure(scale: Scale) -> Section:
    """Time both ways for every layer and number of tokens."""
    kernels = kernels_for(scale.device, torch.bfloat16)
    layers = {name: (i // 64, o // 64) for name, (i, o) in LAYERS.items()}
    rows: list[tuple[object, ...]] = []
    for name, (i, o) in (layers if scale.small else LAYERS).items():
        for n in TOKENS[:2] if scale.small else TOKENS:
            rows.append((name, n, *_row(scale, kernels, n, i, o)))
            print(in_a_line(rows[-1]), flush=True)
    said = "bf16, added to sums in fp32. Columns after the speed are times relative to two products"
    values = {"rows": [dict(zip(_HEAD, row, strict=True)) for row in rows]}
    return Section([f"{said}.", "", *table(_HEAD, rows)], values)


def _row(scale: Scale, kernels: Kernels, n: int, i: int, o: int) -> tuple[object, ...]:
    two, one, copied = laps(scale, works(scale, kernels, n, i, o)[0])
    return 1e6 * two, 2 * 2 * n * i * o / two / 1e12, one / two, copied / two


def works(
    scale: Scale, kernels: Kernels, n: int, i: int, o: int
) -> tuple[list[Callable[[], object]], Tensor]:
    """Return the ways to add the gradients of two microbatches, and the sum [o, i] they add to."""
    total_oi = torch.zeros(o, i, device=scale.device)
    grads = [scale.drawn(n, o) for _ in range(2)]
    xs = [scale.drawn(n, i) for _ in range(2)]
    grad_2no, x_2ni = torch.cat(grads), torch.cat(xs)

    def two() -> None:
        for grad_no, x_ni in zip(grads, xs, strict=True):
            kernels.accumulate_product_(total_oi, grad_no.T, x_ni)

    def one() -> None:
        kernels.accumulate_product_(total_oi, grad_2no.T, x_2ni)

    def copied() -> None:
        kernels.accumulate_product_(total_oi, torch.cat(grads).T, torch.cat(xs))

    return [two, one, copied], total_oi
