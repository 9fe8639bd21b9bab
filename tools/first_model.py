"""Chooses the model of a first run on CPUs, so that an iteration takes about two seconds.

``pretrain_gpt.sh`` calls it where there is no GPU. It times the largest product of the model, the
output layer's, and a copy of memory, on as many threads as ranks run at once. The sizes follow from
both speeds. The reason goes to stderr; stdout has the choice, for a shell to read:

    PRECISION=bf16
    HIDDEN_SIZE=256
    MICRO_BATCH_SIZE=4
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Final, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment
from megatron.commands.patience import telling

RANK_0: Final = {"RANK": "0"}
"""The tool is alone, and speaks as rank 0 does."""

with in_environment(), telling("loading PyTorch", environment=RANK_0):
    import torch

    from megatron.flags.command import read
    from megatron.flags.declare import flag, required
    from megatron.flags.ranges import COUNT

SECONDS: Final = 2.0
"""Seconds of an iteration that are aimed at; 30 iterations take a minute."""

SIZES: Final = (
    *((64, samples) for samples in (1, 2, 3, 4)),
    *((hidden, 4) for hidden in (96, 128, 160, 192, 256, 320, 384, 448, 512)),
    *((512, samples) for samples in (6, 8, 12, 16, 24, 32, 48, 64)),
)
"""Hidden size, and samples of a microbatch, from the least work to the most. Beyond 512 a batch
grows instead of the model: the vocabulary stays a large part of the work, and the loss falls more
smoothly."""

LOGITS_MOVED: Final = 10
"""How often S and T read or write a matrix as large as the logits, apart from products."""

LAYER_BYTES: Final = 1000
"""Bytes that norms, activations and attention of a layer move for a token and a channel."""

STEP_BYTES: Final = 30
"""Bytes that the optimizer's step moves for a parameter."""

REST: Final = 1.2
"""All work of a rank, as a multiple of the work that is counted. The rest is data, messages and
Python. This number and ``LAYER_BYTES`` are from CPU times of runs of 8k to 256k entries, in fp32
and bf16."""

_TIMED: Final = 0.4
"""Seconds of each timing."""


class Speed(NamedTuple):
    """Speed of one rank while all ranks work: FLOP/s in products, and bytes/s of memory."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Job:
    """What is known of the job before its model is chosen.

    Attributes:
        vocab_size: entries V.
        ranks: pipeline ranks p.
        cores: cores of this machine.
        layers: transformer layers of the model.
        seq_length: tokens of a sample.
        microbatches: m, of an iteration.
    """

    vocab_size: int
    ranks: int
    cores: int
    layers: int
    seq_length: int
    microbatches: int

    def seconds(self, hidden: int, samples: int, speed: Speed, item: int) -> float:
        """Return the seconds of an iteration, as far as they can be foretold.

        A rank takes 6 FLOPs for each token and parameter, in the layers of its stage and in its
        part of the output layer. It also moves the logits, activations of the layers, and its
        parameters in the optimizer's step. Of m + p intervals m are work (1F1B with one barrier),
        unless ranks share cores: then one rank works while another one waits.

        Args:
            hidden: hidden size h.
            samples: of a microbatch.
            speed: of a rank.
            item: bytes of a number.
        """
        tokens = self.microbatches * samples * self.seq_length
        columns = self.vocab_size / self.ranks
        layers = self.layers / self.ranks
        matrices = 12 * hidden**2 * layers
        multiplied = 6 * tokens * (hidden * columns + matrices)
        moved = tokens * (LOGITS_MOVED * columns * item + LAYER_BYTES * hidden * layers)
        moved += STEP_BYTES * (2 * hidden * columns + matrices)
        waits = (self.microbatches + self.ranks) / self.microbatches
        slower = max(waits, self.ranks / self.cores)
        return slower * REST * (multiplied / speed.flops + moved / speed.bytes)


def choose(
    job: Job, speed: Speed, item: int, sizes: Sequence[tuple[int, int]] = SIZES
) -> tuple[int, int, float]:
    """Return the largest of ``sizes`` that is fast enough, or else the smallest, and its seconds.

    Args:
        job: the job.
        speed: of a rank.
        item: bytes of a number.
        sizes: hidden size and samples of a microbatch, the least work first.
    """
    timed = [(*size, job.seconds(*size, speed, item)) for size in sizes]
    fast = [own for own in timed if own[-1] <= SECONDS]
    return fast[-1] if fast else timed[0]


def allowed(hidden: int | None, samples: int | None, heads: int | None) -> list[tuple[int, int]]:
    """Return the sizes that leave an explicit hidden size, microbatch and number of heads.

    An explicit hidden size goes with any of the numbers of samples.
    """
    numbers = sorted({own for _, own in SIZES}) if samples is None else [samples]
    if hidden is not None:
        return [(hidden, own) for own in numbers]
    step = 2 * (heads or 1)  # rotary positions pair the channels of a head
    sizes = ((-(-width // step) * step, own) for width, own in SIZES)
    return list(dict.fromkeys((width, own if samples is None else samples) for width, own in sizes))


def measured(job: Job, dtype: torch.dtype) -> Speed:
    """Return the speed of a rank, timed in this process on as many threads as ranks run at once.

    The product is that of 256 tokens with the output layer of one rank, at a hidden size of 256.
    Times are CPU times of a thread, so other programs do not count.
    """
    torch.set_num_threads(1)
    threads = min(job.ranks, job.cores)
    columns = max(1, min(job.vocab_size // job.ranks, _MOST_COLUMNS))
    with ThreadPoolExecutor(threads) as pool:

        def together(work: Callable[[], Callable[[], object]]) -> float:
            return max(pool.map(lambda _: _median_seconds(work()), range(threads)))

        product = together(partial(_product, columns, dtype))
        copied = together(_copy)
    return Speed(2 * 256 * 256 * columns / product, 2 * _COPIED / copied)


_MOST_COLUMNS: Final = 32_768
"""Columns of the largest product: its result is larger than a cache already."""

_COPIED: Final = 64 << 20
"""Bytes of a copy, more than a cache holds."""


def _product(columns: int, dtype: torch.dtype) -> Callable[[], object]:
    x = torch.rand(256, 256).to(dtype)
    w = torch.rand(columns, 256).to(dtype)
    y = torch.empty(256, columns, dtype=dtype)
    return lambda: torch.matmul(x, w.t(), out=y)


def _copy() -> Callable[[], object]:
    source = torch.zeros(_COPIED, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def _median_seconds(work: Callable[[], object]) -> float:
    work()  # takes memory and chooses a kernel
    times: list[float] = []
    while not times or sum(times) < _TIMED:
        begin = thread_time()
        work()
        times.append(thread_time() - begin)
    return median(times)


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class FirstModelFlags:
    """The job."""

    vocab_size: int = required("Entries of the vocabulary.", COUNT)
    ranks: int = required("Pipeline ranks.", COUNT)
    layers: int = required("Transformer layers of the model.", COUNT)
    seq_length: int = required("Tokens of a sample.", COUNT)
    microbatches: int = required("Microbatches of an iteration.", COUNT)
    cores: int = flag(os.cpu_count() or 1, "Cores of this machine.", COUNT, unset="all")
    precision: Literal["bf16", "fp32"] | None = flag(None, "Type of activations.",
        unset="the faster one")
    hidden_size: int | None = flag(None, "A hidden size that is to stay.", COUNT, unset="chosen")
    micro_batch_size: int | None = flag(None, "Samples of a microbatch that are to stay.", COUNT,
        unset="chosen")
    heads: int | None = flag(None, "Attention heads, which divide the hidden size.", COUNT,
        unset="one for 32 channels")
# fmt: on


def main(argv: Sequence[str]) -> int:
    """Time the machine and print the choice; return the exit status."""
    flags = read(argv, __doc__, FirstModelFlags)[FirstModelFlags]
    job = Job(
        flags.vocab_size, flags.ranks, flags.cores, flags.layers, flags.seq_length,
        flags.microbatches,
    )  # fmt: skip
    names: tuple[str, ...] = ("bf16", "fp32") if flags.precision is None else (flags.precision,)
    with telling("timing the machine", environment=RANK_0):
        speeds = {name: measured(job, getattr(torch, _DTYPES[name])) for name in names}
    precision = max(speeds, key=lambda name: speeds[name].flops)
    sizes = allowed(flags.hidden_size, flags.micro_batch_size, flags.heads)
    found = choose(job, speeds[precision], 4 if precision == "fp32" else 2, sizes)
    for line in _reason(job, speeds, precision, found):
        print(line, file=sys.stderr)
    print(f"PRECISION={precision}\nHIDDEN_SIZE={found[0]}\nMICRO_BATCH_SIZE={found[1]}")
    return 0


_DTYPES: Final = {"bf16": "bfloat16", "fp32": "float32"}


def _reason(
    job: Job, speeds: dict[str, Speed], precision: str, found: tuple[int, int, float]
) -> Iterator[str]:
    """Yield the lines on a choice."""
    hidden, samples, seconds = found
    each = ", ".join(f"{speed.flops / 1e9:.0f} in {name}" for name, speed in speeds.items())
    yield (
        f"This machine multiplies at {each} (GFLOP/s of a core, in the output layer's product), "
        f"and copies {speeds[precision].bytes / 1e9:.1f} GB/s."
    )
    yield (
        f"So the model gets hidden size {hidden} and {samples} samples a microbatch, in "
        f"{precision}: an iteration of {job.ranks} ranks on {job.cores} cores should take about "
        f"{seconds:.1f} s. HIDDEN_SIZE and MICRO_BATCH_SIZE choose others."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
