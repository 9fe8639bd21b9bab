"""What a device attains: arithmetic, memory traffic and links, each as one rate.

A pass takes the time of its matrix products, plus the time of what its elementwise kernels move
through memory, plus what it costs to launch. The rates are attained ones: peaks of a data sheet
multiplied by what measured runs reach.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Final, Literal

from megatron.schedules.passes import PassKind

Product = Literal["forward", "backward", "output"]
"""Kinds of matrix products: a layer's forward, its backward, the three of the output layer."""


@dataclass(frozen=True)
class Device:
    """One accelerator and the links to its neighbours.

    Attributes:
        peak_flops: matrix products, FLOP/s of the data sheet.
        attained: share of the peak that each kind of product reaches.
        memory_bandwidth: attained by elementwise kernels, bytes/s read and written.
        link_bandwidth: of one direction of a link, bytes/s; infinite where communication is free.
        link_latency: of a message, in seconds.
        overhead: seconds that a pass takes beside its work, by kind; absent ones none.

    Raises:
        ValueError: if a rate is not positive, or a time negative.
    """

    peak_flops: float
    attained: Mapping[Product, float]
    memory_bandwidth: float
    link_bandwidth: float
    link_latency: float = 0.0
    overhead: Mapping[PassKind, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rates = {
            "peak_flops": self.peak_flops,
            "memory_bandwidth": self.memory_bandwidth,
            **{f"attained {kind}": share for kind, share in self.attained.items()},
        }
        times = {
            "link_latency": self.link_latency,
            **{f"overhead {kind}": time for kind, time in self.overhead.items()},
        }
        for name, rate in rates.items():
            if not (isfinite(rate) and rate > 0):
                raise ValueError(f"{name}={rate:g} is no rate: give a number above 0")
        if not self.link_bandwidth > 0:
            raise ValueError(
                f"link_bandwidth={self.link_bandwidth:g} is no rate: give a number above 0"
            )
        for name, time in times.items():
            if not (isfinite(time) and time >= 0):
                raise ValueError(f"{name}={time:g} is no time: give seconds, 0 or more")

    def product(self, kind: Product, flops: float) -> float:
        """Return the seconds that matrix products of a kind take.

        Raises:
            ValueError: if the device does not say what such products attain.
        """
        if kind not in self.attained:
            raise ValueError(f"the share of the peak that {kind} products attain is not given")
        return flops / (self.peak_flops * self.attained[kind])

    def traffic(self, size: float) -> float:
        """Return the seconds in which elementwise kernels read and write ``size`` bytes."""
        return size / self.memory_bandwidth

    def message(self, size: float) -> float:
        """Return the seconds from one end of a link to the other for ``size`` bytes."""
        return self.link_latency + size / self.link_bandwidth


@dataclass(frozen=True)
class Traffic:
    """Bytes that elementwise kernels read and write.

    Attributes:
        layer_forward: of a layer's F, per element of its input.
        layer_backward: of a layer's B, per element of its input.
        loss_forward: from logits to their exponentials and statistics, per logit.
        loss_backward: from exponentials to the gradient of the logits, per logit.
        exponentials: of a pass that only forms exponentials (E), per logit.
        rescale: what T adds because the shards' maxima differ, per logit.
        early_gradient: what S adds when it forms the input gradient before the barrier, per logit.
        lookup: of the input layer's forward, per element of its output.
        scatter: of the input layer's backward, per element of its output: rows are added to the
            gradient where they belong.
        gradient: of the input layer's backward, per parameter: a dense gradient is written, and
            added to the sum of all microbatches.
    """

    layer_forward: float
    layer_backward: float
    loss_forward: float
    loss_backward: float
    exponentials: float
    rescale: float
    early_gradient: float
    lookup: float
    scatter: float
    gradient: float


UNFUSED: Final = Traffic(
    layer_forward=46,
    layer_backward=62,
    loss_forward=38,
    loss_backward=14,
    exponentials=8,
    rescale=8,
    early_gradient=6,
    lookup=4,
    scatter=0,
    gradient=8,
)
"""Megatron-LM's kernels in 16 bits. A layer: two norms (4 bytes forward, 6 backward), flash
attention (8 and 16), two dropouts with their residuals (7 and 5), GELU of 4h (16 and 24). Logits:
to fp32 (6), maximum (4), subtraction, exponentials and division in place (8 each), sum (4); back,
the product with the loss's gradient (8) and the way to 16 bits (6). The input's gradient: zeros
(2), then a sum of 16-bit numbers (6)."""

FLOPS_PER_BYTE: Final = 100
"""What moving a byte costs on the notional device, as arithmetic that would take as long: devices
do about a hundred operations in the time of one byte."""

NOTIONAL: Final = Device(
    peak_flops=1.0,
    attained={"forward": 1.0, "backward": 1.0, "output": 1.0},
    memory_bandwidth=1 / FLOPS_PER_BYTE,
    link_bandwidth=inf,
)
"""The device that passes are placed for until they have been measured: time is FLOPs, and
communication is free. It is nobody's device, and so the same on every rank of any cluster."""

FUSED: Final = Traffic(
    layer_forward=0,
    layer_backward=0,
    loss_forward=0,
    loss_backward=0,
    exponentials=4,
    rescale=0,
    early_gradient=0,
    lookup=6,
    scatter=6,
    gradient=0,
)
"""Elementwise work that hides in the products beside it, so that only passes without a product
count: E reads a logit and writes its exponential (2 bytes each); IF and IB read a row, or its
gradient, and add it to fp32 or 16-bit sums."""
