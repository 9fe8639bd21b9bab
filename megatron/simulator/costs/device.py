"""The rates that a device attains in arithmetic, memory traffic and links.

The time of a pass is the sum of three: its matrix products, the memory traffic of its elementwise
kernels, and its launch. An attained rate is the peak of the data sheet times the share that
measured runs reach.
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
        peak_flops: peak of matrix products by the data sheet, in FLOP/s.
        attained: share of the peak that each kind of product reaches.
        memory_bandwidth: bytes/s that elementwise kernels attain, reads and writes together.
        link_bandwidth: bytes/s of one direction of a link; infinite if communication is free.
        link_latency: latency of a message in seconds.
        overhead: seconds that a pass takes in addition to its work, by kind; 0 for absent kinds.

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

    def round(self, size: float, ranks: int) -> float:
        """Return the seconds of a reduce-scatter or an all-gather along a ring.

        An all-reduce is one of each.

        Args:
            size: bytes of the whole tensor.
            ranks: of the ring.
        """
        return (ranks - 1) * self.message(size / ranks)


@dataclass(frozen=True)
class Traffic:
    """Bytes that elementwise kernels read and write.

    Attributes:
        layer_forward: in a layer's F, per element of its input.
        layer_backward: in a layer's B, per element of its input.
        outside_forward: of ``layer_forward`` what lies outside of attention and MLP.
        outside_backward: of ``layer_backward`` what lies outside of attention and MLP.
        loss_forward: from logits to their exponentials and statistics, per logit.
        loss_backward: from exponentials to the gradient of the logits, per logit.
        exponentials: in a pass that only computes exponentials (E), per logit.
        rescale: additional bytes of T because the shards' maxima differ, per logit.
        early_gradient: additional bytes of S if it computes the input gradient before the barrier,
            per logit.
        lookup: in the input layer's forward, per element of its output.
        scatter: in the input layer's backward, per element of its output, to add rows to the
            gradient.
        gradient: in the input layer's backward, per parameter, to write a dense gradient and add
            it to the sum over microbatches.
    """

    layer_forward: float
    layer_backward: float
    outside_forward: float
    outside_backward: float
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
    outside_forward=22,
    outside_backward=22,
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
attention (8 and 16), two dropouts with their residuals (7 and 5), GELU of 4h (16 and 24). Norms and
dropouts lie outside of attention and MLP. Logits:
to fp32 (6), maximum (4), subtraction, exponentials and division in place (8 each), sum (4); back,
the product with the loss's gradient (8) and the way to 16 bits (6). The input's gradient: zeros
(2), then a sum of 16-bit numbers (6)."""

FLOPS_PER_BYTE: Final = 100
"""FLOPs that count for moving one byte on the notional device: real devices do about a hundred
operations in that time."""

NOTIONAL: Final = Device(
    peak_flops=1.0,
    attained={"forward": 1.0, "backward": 1.0, "output": 1.0},
    memory_bandwidth=1 / FLOPS_PER_BYTE,
    link_bandwidth=inf,
)
"""The notional device, for which passes are placed until they have been measured. Its times are
FLOPs, and communication is free. It depends on no hardware, so it is the same on every rank."""

FUSED: Final = Traffic(
    layer_forward=0,
    layer_backward=0,
    outside_forward=0,
    outside_backward=0,
    loss_forward=0,
    loss_backward=0,
    exponentials=4,
    rescale=0,
    early_gradient=0,
    lookup=6,
    scatter=6,
    gradient=0,
)
"""Only the traffic of passes without a product counts; other elementwise work overlaps with the
products. E reads a logit and writes its exponential (2 bytes each). IF and IB read a row, or its
gradient, and add it to fp32 or 16-bit sums."""
