"""Seconds of a kernel on a GPU.

* The result of a matrix product is cut into tiles. A multiprocessor computes one tile at a time,
  and all multiprocessors together compute a wave of tiles. A wave that is not full takes as long as
  a full wave. Before a tile multiplies, it fills a pipeline of loads. This takes as long as some
  additional steps along k, the dimension over which a product sums. If there are fewer tiles than
  multiprocessors, libraries cut k into parts, and add up the sums of the parts.
* Fused attention attains a share of the peak of its own. Its FLOPs are those that the kernel
  executes.
* A kernel takes at least the time in which the memory moves its bytes. A kernel without products
  takes just this time.
* The host queues kernels ahead of the GPU. It costs no time as long as it launches kernels faster
  than the GPU runs them. Where it may not, a dry run says so, without a time
  (``planning/launch_pace.py``). There is a gap between the end of a kernel and the start
  of the next kernel.

``docs/predictions.md`` says how many constants there are, and where they come from.
"""

from dataclasses import dataclass
from math import ceil
from typing import Final

from megatron.simulator.costs.count import Launch, Product, Quickness

TILES: Final = ((256, 128), (128, 256), (128, 128))
"""Rows and columns of the tiles that libraries choose from for 16 bits."""

TILE_STEP: Final = 64
"""Depth k by which a tile advances; a remaining depth below this takes as long as a whole step."""

TILE_READS: Final = 43.0
"""Multiply-adds that a multiprocessor could do while it reads one number of a factor. A tile of a x
b does I = a b / (a + b) for every number that it reads, and attains I / (I + 43). Calibrated: tiles
of 128 x 128 then attain 0.9 of the speed of tiles of 256 x 128."""

TILE_FILL: Final = 128
"""Depth k that a tile could have multiplied while its pipeline fills and its result is written.
Calibrated; of the size of the three stages of 32 numbers that are under way in a tile."""

EIGHT_BITS: Final = 1.7
"""Speed of a product of 8-bit factors by cuBLAS over the same product of 16-bit factors. Calibrated
on iterations of H100s (docs/predictions.md). Measured on one H200 for 8,192 tokens, 4,096 and
16,384 channels: 1.88 and 1.78 for outputs and gradients of inputs, 1.46 for gradients of weights
(docs/benchmarks/2026-11-26-h200-layouts). All other products
in 8 bits are Triton programs, and as fast as products of 16 bits here. Their gradients of weights
with scales of blocks took there 1.19 to 1.27 times as long; products of experts were not
measured."""

BLOCKS: Final = 1.65
"""The same for outputs and gradients of inputs where every block of a factor has its own scale, and
cuBLAS multiplies: 1.61 to 1.71 on one H200, of 2,048 to 8,192 tokens. Only on Hopper."""

BLOCK_WEIGHTS: Final = 1.3
"""The same for gradients of weights by cuBLAS, without the addition that follows: 1.28 and 1.33
times as fast as outputs of 16 bits on one H200, with 4,096 and 8,192 tokens. Only on Hopper."""

MX: Final = EIGHT_BITS
"""The same for all products with one scale for 32 numbers. An assumption: by the data sheets
Blackwell multiplies them as fast as with one scale for a tensor, and nobody has measured them."""


@dataclass(frozen=True)
class Rates:
    """The rates at which one GPU runs kernels.

    Attributes:
        peak_flops: peak of matrix products by the data sheet, in FLOP/s.
        multiprocessors: number of multiprocessors.
        memory_bandwidth: bandwidth of the memory by the data sheet, in bytes/s.
        product_share: share of the peak that full waves of endless tiles attain.
        attention_share: share of the peak that fused attention attains.
        memory_share: share of the memory bandwidth that kernels attain.
        gap: seconds from the end of a kernel to the begin of the next.
        tile_reads: see ``TILE_READS``.
        tile_fill: see ``TILE_FILL``.
        eight_bits: see ``EIGHT_BITS``; 1 if the GPU does not multiply numbers of 8 bits.
        blocks: see ``BLOCKS``; 1 if cuBLAS has no such product for the GPU.
        block_weights: see ``BLOCK_WEIGHTS``; 1 if cuBLAS has no such product for the GPU.
        mx: see ``MX``; 1 if cuBLAS has no such product for the GPU.

    Raises:
        ValueError: if a rate is not above 0, or the gap is below 0.
    """

    peak_flops: float
    multiprocessors: int
    memory_bandwidth: float
    product_share: float
    attention_share: float
    memory_share: float
    gap: float
    tile_reads: float = TILE_READS
    tile_fill: float = TILE_FILL
    eight_bits: float = EIGHT_BITS
    blocks: float = BLOCKS
    block_weights: float = BLOCK_WEIGHTS
    mx: float = MX

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "gap" and not value > 0:
                raise ValueError(f"{name}={value:g} is no rate: give a number above 0")
        if self.gap < 0:
            raise ValueError(f"gap={self.gap:g} is no time: give seconds, 0 or more")

    def traffic(self, size: float) -> float:
        """Return the seconds in which kernels read and write ``size`` bytes."""
        return size / (self.memory_share * self.memory_bandwidth)

    def seconds(self, launch: Launch) -> float:
        """Return the seconds of a kernel, with the gap after it."""
        return max(self.traffic(launch.bytes), self._multiplied(launch)) + self.gap

    def faster(self, quickness: Quickness) -> float:
        """Return the speed of such a product over the same product of 16 bits."""
        match quickness:
            case "16 bits":
                return 1.0
            case "8 bits":
                return self.eight_bits
            case "8 bits by blocks":
                return self.blocks
            case "8-bit weight gradients by blocks":
                return self.block_weights
            case "MXFP8":
                return self.mx

    def _multiplied(self, launch: Launch) -> float:
        """Return the seconds of a kernel's products."""
        if launch.product is None:
            return (launch.executed or launch.flops) / (self.attention_share * self.peak_flops)
        speed = product_speed(launch.product, self.multiprocessors, self.tile_reads, self.tile_fill)
        share = self.product_share * speed * self.faster(launch.quickness)
        return launch.flops / (share * self.peak_flops)


def product_speed(
    product: Product, multiprocessors: int, reads: float = TILE_READS, fill: float = TILE_FILL
) -> float:
    """Return the speed of a product, as a share of the best speed.

    At the best speed every wave is full, and tiles are so deep that filling them takes no time. The
    sums of parts of k are not priced.
    """
    best = max(_tile_speed(tile, reads) for tile in TILES)
    work = product.m * product.n * product.batch / multiprocessors * product.k
    taken = min(
        _steps(product, tile, multiprocessors, fill) * best / _tile_speed(tile, reads)
        for tile in TILES
    )
    return work / taken


def _steps(product: Product, tile: tuple[int, int], multiprocessors: int, fill: float) -> float:
    """Return the multiply-adds for which a product with tiles of a size occupies a multiprocessor.

    Those that it could have done while it fills a tile, or waits for the others, are among them.
    """
    rows, columns = tile
    tiles = ceil(product.m / rows) * ceil(product.n / columns) * product.batch
    parts = max(1, multiprocessors // tiles)
    depth = TILE_STEP * ceil(product.k / parts / TILE_STEP) + fill
    return ceil(tiles / multiprocessors) * rows * columns * depth


def _tile_speed(tile: tuple[int, int], reads: float) -> float:
    """Return the share of a multiprocessor's speed that a tile attains."""
    rows, columns = tile
    intensity = rows * columns / (rows + columns)
    return intensity / (intensity + reads)
