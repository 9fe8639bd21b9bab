#!/usr/bin/env python3
"""Time and peak memory of a head's forward and backward: ours over ranks, PyTorch's in one process.

    python tools/head_benchmark.py --vocab-sizes 32k,64k,128k,256k --ranks 2

Every way runs in processes of its own, ranks and threads together filling as many cores as there
are ranks. Seconds are those of a round on the slowest rank, the median of all rounds; processor
seconds are what all ranks have worked, which other processes on the machine disturb less. Memory is
what a rank holds at most beyond its input and its part of the matrix, gradients included: on a CPU
from a further process that gives freed memory back at once. PyTorch's F.linear_cross_entropy
(2.13 or newer) is measured without options, and with chunks of its own choice.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megatron.flags.command import read
from megatron.flags.declare import flag
from megatron.flags.ranges import COUNT, NOT_NEGATIVE
from megatron.library.vocabulary import VocabParallelHead
from megatron.training.metrics.peak_memory import peak_memory
from tools.benchmarking import harness
from tools.benchmarking.allocator import allocator, allocator_name
from tools.pages.tables import row, rule

MB: Final = 1e6
_LIMIT: Final = timedelta(minutes=20)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes hidden states [n, h], a matrix [V, h] and targets [n]; returns the mean loss."""


def _cross_entropy(x_nh: Tensor, weight_vh: Tensor, targets_n: Tensor) -> Tensor:
    return functional.cross_entropy(x_nh @ weight_vh.T, targets_n)


def _linear_cross_entropy(x_nh: Tensor, weight_vh: Tensor, targets_n: Tensor) -> Tensor:
    loss: Tensor = functional.linear_cross_entropy(x_nh, weight_vh, targets_n)
    return loss


def _in_chunks(x_nh: Tensor, weight_vh: Tensor, targets_n: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    loss: Tensor = functional.linear_cross_entropy(x_nh, weight_vh, targets_n, options=options)
    return loss


WHOLE: Final[dict[str, Loss]] = {
    "F.cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy, chunks": _in_chunks,
}
SPLIT: Final[dict[str, dict[str, Any]]] = {
    "VocabParallelHead": {},
    "VocabParallelHead, recompute": {"recompute": True},
}
EVERY: Final = (*WHOLE, *SPLIT)


def _sizes(text: str) -> Sequence[int]:
    """Read sizes such as 32k,64k.

    Raises:
        ValueError: the text holds no sizes.
    """
    try:
        found = [int(w[:-1]) * 1000 if w.endswith("k") else int(w) for w in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ValueError("give sizes of at least 1, as 32k,64000")
    return tuple(found)


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class HeadFlags(harness.RoundFlags):
    """What is measured."""

    vocab_sizes: Sequence[int] = flag(_sizes("32k,64k,128k,256k"), "Entries, such as 32k,64k.",
        metavar="V,...", reads=_sizes, unset="32k,64k,128k,256k")
    ranks: int = flag(2, "Ranks that share the matrix.", COUNT)
    threads: int = flag(2, "Of one process; several ranks share them.", COUNT)
    tokens: int = flag(1024, "Tokens, n.", COUNT)
    hidden_size: int = flag(512, "Width, h.", COUNT)
    dtype: Literal["bfloat16", "float32"] = flag("bfloat16", "Of the matrix and its input.")
    device: Literal["cpu", "cuda"] = flag("cpu", "Of the ranks.")
    only: tuple[str, ...] = flag((), "This way; may be given several times.", choices=EVERY,
        metavar="WAY", repeats=True, unset=f"all of {', '.join(EVERY)}")
    way: str = flag("", "Of this process.", hidden=True)
    meeting: str = flag("", "File where its ranks meet.", hidden=True)
    rank: int = flag(0, "Its rank.", NOT_NEGATIVE, hidden=True)
# fmt: on


@dataclass(frozen=True)
class Found:
    """Time, memory and loss of one way.

    Attributes:
        seconds: seconds of every round on the slowest rank.
        processor: mean CPU seconds of all ranks together in a round.
        bytes: largest memory of a rank beyond input and matrix.
        loss: the mean loss.
    """

    seconds: list[float]
    processor: float
    bytes: float
    loss: float


def ways(chosen: Sequence[str], ranks: int) -> Iterator[tuple[str, int]]:
    """Yield every chosen way with its number of ranks."""
    torch_has_it = hasattr(functional, "linear_cross_entropy")
    for name in chosen:
        if name in SPLIT:
            yield name, 1
            yield name, ranks
        elif name == "F.cross_entropy" or torch_has_it:
            yield name, 1


def run_rank(arguments: HeadFlags) -> dict[str, Any]:
    """Measure one rank of one way."""
    rank, ranks = arguments.rank, arguments.ranks
    device = torch.device(f"cuda:{rank}" if arguments.device == "cuda" else arguments.device)
    torch.set_num_threads(max(1, arguments.threads // ranks))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        backend, meeting = (
            "nccl" if device.type == "cuda" else "gloo",
            f"file://{arguments.meeting}",
        )
        dist.init_process_group(backend, meeting, _LIMIT, ranks, rank)
    call, x_nh, leaves = _problem(arguments, device)

    def both_ways() -> float:
        result = call()
        result.backward()
        return float(result.detach())  # on a GPU this waits for the result

    before, loss = _held(device), 0.0
    times: list[harness.Taken] = []
    for _ in range(arguments.rounds + 1):
        if ranks > 1:
            dist.barrier()
        loss, taken = harness.timed(both_ways, device.type)
        times.append(taken)
        for leaf in (x_nh, *leaves):
            leaf.grad = None
    if ranks > 1:
        dist.destroy_process_group()
    return {
        "seconds": [taken.seconds for taken in times[1:]],
        "processor": fmean(taken.cpu for taken in times[1:]),
        "bytes": peak_memory(device).held - before,
        "loss": loss,
    }


def _problem(
    arguments: HeadFlags, device: torch.device
) -> tuple[Callable[[], Tensor], Tensor, list[Tensor]]:
    """Return the forward of a way, its input, and the tensors of its matrix."""
    v, h, n = arguments.vocab_sizes[0], arguments.hidden_size, arguments.tokens
    dtype = getattr(torch, arguments.dtype)
    generator = torch.Generator().manual_seed(1)
    x_nh = torch.randn(n, h, generator=generator).to(device, dtype).requires_grad_()
    targets_n = torch.randint(v, (n,), generator=generator).to(device)
    if arguments.way in SPLIT:
        head = VocabParallelHead(h, v, device=device, dtype=dtype, **SPLIT[arguments.way])
        with torch.no_grad():
            first, own = head.shard.first_real_row, head.weight[: head.shard.real_rows]
            _fill(own, first)
        return lambda: head(x_nh, targets_n), x_nh, [head.weight]
    weight_vh = torch.empty(v, h, device=device, dtype=dtype)
    _fill(weight_vh, 0)
    weight_vh.requires_grad_()
    loss = WHOLE[arguments.way]
    return lambda: loss(x_nh, weight_vh, targets_n), x_nh, [weight_vh]


def _fill(rows_vh: Tensor, first: int) -> None:
    """Fill rows of the matrix with values that do not depend on the rank that holds them."""
    h = rows_vh.shape[1]
    columns = torch.arange(h, device=rows_vh.device) * 0.7
    for some in range(0, len(rows_vh), 4096):
        part = rows_vh[some : some + 4096]
        number = torch.arange(first + some, first + some + len(part), device=rows_vh.device)
        part.copy_(torch.sin(number[:, None] * 1.3 + columns) * 0.05)


def _held(device: torch.device) -> float:
    """Return the bytes in use now, and restart the measurement of the peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return float(torch.cuda.memory_allocated(device))
    return harness.held()


def measure(argv: Sequence[str], way: str, ranks: int, vocab_size: int, on_cpu: bool) -> Found:
    """Run a way for its times, and on a CPU a second time for its memory."""
    timed = _run(argv, way, ranks, vocab_size, allocator() if on_cpu else {})
    memory = timed
    if on_cpu:
        memory = _run([*argv, "--rounds", "1"], way, ranks, vocab_size, harness.FREED_AT_ONCE)
    rounds = zip(*(own["seconds"] for own in timed), strict=True)
    return Found(
        [max(seconds) for seconds in rounds],
        sum(own["processor"] for own in timed),
        max(own["bytes"] for own in memory),
        timed[0]["loss"],
    )


def _run(
    argv: Sequence[str], way: str, ranks: int, vocab_size: int, variables: dict[str, str]
) -> list[dict[str, Any]]:
    """Return the measurements of every rank of a way."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--way", way, "--ranks", str(ranks), "--vocab-sizes", str(vocab_size)]
        command = [sys.executable, __file__, *argv, *words, "--meeting", f"{folder}/meeting"]
        what = f"{way} with {ranks} ranks at V = {vocab_size}"
        commands = [[*command, "--rank", str(rank)] for rank in range(ranks)]
        return harness.apart(what, commands, variables)


def report(
    arguments: HeadFlags, argv: Sequence[str], measured: list[dict[str, Any]]
) -> Iterator[str]:
    """Yield the lines of the table as its rows are measured, and add them to ``measured``."""
    yield "| V | way | ranks | s, median (range) | processor s | MB a rank | loss |"
    yield rule(7, "rlr")
    for vocab_size in arguments.vocab_sizes:
        for way, ranks in ways(arguments.only or EVERY, arguments.ranks):
            found = measure(argv, way, ranks, vocab_size, arguments.device == "cpu")
            measured.append({"V": vocab_size, "way": way, "ranks": ranks, **asdict(found)})
            figures = (f"{found.processor:.2f}", f"{found.bytes / MB:.0f}", f"{found.loss:.4f}")
            yield row(vocab_size, way, ranks, harness.spread(found.seconds, 3), *figures)


def parse_arguments(argv: Sequence[str]) -> HeadFlags:
    """Read the command line; a report overrides flags of its ranks without a note."""
    return read(argv, __doc__, HeadFlags, speak="--way" not in argv)[HeadFlags]


def main() -> None:
    """Report, or measure a rank for a report."""
    argv = sys.argv[1:]
    arguments = parse_arguments(argv)
    if arguments.way:
        print(json.dumps(run_rank(arguments)))
        return
    said = (
        f"{arguments.tokens} tokens, h = {arguments.hidden_size}, {arguments.dtype}, "
        f"{arguments.threads} threads on {arguments.device}, {arguments.rounds} rounds."
    )
    run = harness.Run(
        ["tools/head_benchmark.py", *argv], arguments.device, said, [], allocator_name()
    )
    run.publish(report(arguments, argv, run.measured), arguments)


if __name__ == "__main__":
    main()
