#!/usr/bin/env python3
"""Time and memory of S and T with and without ``--vocab-recompute``, for one shard on this CPU.

    python tools/vocab_recompute.py --vocab-size 256000 --shards 8 --hidden-size 2048 --rounds 5

A round runs S and T of one microbatch in every way, in an order that changes from round to round,
because machines drift; ratios are formed within a round. Seconds are those that the processor has
worked for this process, so that other processes disturb them little. Every way has one more process
for its memory: there freed memory goes back at once, and the process stands for all that S and T
hold. One shard stands for all: it merges its own statistics only.
"""

import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from megatron.flags.command import read
from megatron.flags.declare import flag
from megatron.flags.ranges import COUNT
from megatron.layers.vocabulary.output_s import ShardState, merge_statistics
from megatron.schedules.treatments import TREATMENTS, Treatment
from megatron.training.metrics.peak_memory import peak_memory
from tools.benchmarking import harness
from tools.benchmarking.allocator import allocator, allocator_name
from tools.gpu_sections.output_layer import TimedShard
from tools.pages.tables import row, rule

MB: Final = 1e6

WAYS: Final = tuple((name, again) for name in ("vocab-1", "vocab-2") for again in (False, True))
"""Treatments of the vocabulary, each with and without recomputed logits."""

_FEW: Final = 1000
"""Entries of a small shard on which all code runs once before memory is measured."""


@dataclass(frozen=True)
class ShardFlags(harness.RoundFlags):
    """Shard."""

    vocab_size: int = flag(256_000, "Entries of all shards.", COUNT)
    shards: int = flag(8, "Ranks that share the vocabulary.", COUNT)
    hidden_size: int = flag(2048, "Width of the model.", COUNT)
    seq_length: int = flag(2048, "Tokens.", COUNT)
    memory_of: str = flag("", "Measure its memory.", choices=("vocab-1", "vocab-2"), hidden=True)
    vocab_recompute: bool = flag(False, "Whether T forms the logits again.", hidden=True)


class Taken(NamedTuple):
    """CPU seconds of the passes S and T."""

    s: float
    t: float

    @property
    def both(self) -> float:
        """The sum of both passes."""
        return self.s + self.t


class Shard:
    """One shard's output layer and a microbatch for it.

    Args:
        arguments: the sizes.
        treatment: how the vocabulary is treated.
        recompute: whether T computes the logits again.
    """

    def __init__(self, arguments: ShardFlags, treatment: str, recompute: bool) -> None:
        v, h, n = arguments.vocab_size, arguments.hidden_size, arguments.seq_length
        own = TimedShard(v, arguments.shards, n, h, again=recompute)
        self._layer, _, *self._taken = own.drawn(torch.device("cpu"))
        self._treatment: Treatment = TREATMENTS[treatment]

    def s(self) -> ShardState:
        """Run S and drop its parts A and D of the input gradient, as their barrier does."""
        form_gradient = self._treatment.gradient_pass == "S"
        x_nh, targets_n, _ = self._taken
        state = self._layer.s(x_nh, targets_n, form_gradient)
        state.drop_gradient()
        return state

    def t(self, state: ShardState) -> Tensor | None:
        """Run T, after a barrier with this shard only."""
        *_, weight_n = self._taken
        merged = merge_statistics(state.statistics_4n.unsqueeze(0))
        form_gradient = self._treatment.gradient_pass == "T"
        return self._layer.t(state, merged, weight_n, form_gradient=form_gradient)

    def timed(self) -> Taken:
        """Run both passes."""
        state, of_s = harness.timed(self.s)
        _, of_t = harness.timed(lambda: self.t(state))
        return Taken(of_s.cpu, of_t.cpu)


def measure_memory(arguments: ShardFlags) -> dict[str, float]:
    """Return bytes beyond the memory before S: between S and T, and the peak until T's end."""
    shard = Shard(arguments, arguments.memory_of, arguments.vocab_recompute)
    few = replace(arguments, vocab_size=4 * _FEW, shards=4)
    Shard(few, arguments.memory_of, arguments.vocab_recompute).timed()  # loads code into memory
    before = harness.held()
    state = shard.s()
    between = harness.held() - before
    shard.t(state)
    peak = peak_memory(torch.device("cpu")).held - before
    return {"between": between, "peak": peak}


def memory_of(argv: Sequence[str], treatment: str, recompute: bool) -> dict[str, float]:
    """Return the result of ``measure_memory`` in a process of its own."""
    command = [sys.executable, __file__, *argv, "--memory-of", treatment]
    command += ["--vocab-recompute"] * recompute
    found: dict[str, float]
    [found] = harness.apart(f"the memory of {treatment}", [command], harness.FREED_AT_ONCE)
    return found


def measure_times(arguments: ShardFlags) -> dict[tuple[str, bool], list[Taken]]:
    """Return the seconds of every way in every round, after a round to warm up."""
    shards = {way: Shard(arguments, *way) for way in WAYS}
    found: dict[tuple[str, bool], list[Taken]] = {way: [] for way in WAYS}
    for number, way in harness.turns(WAYS, arguments.rounds + 1):
        taken = shards[way].timed()
        if number:
            found[way].append(taken)
    return found


def sizes(arguments: ShardFlags) -> str:
    """Return a sentence on the shard."""
    rows = -(-arguments.vocab_size // arguments.shards)
    exponentials = 2 * rows * arguments.seq_length
    return (
        f"One shard of {rows:,} of {arguments.vocab_size:,} entries, {arguments.seq_length} "
        f"tokens, h = {arguments.hidden_size}, bf16, {torch.get_num_threads()} thread; "
        f"exponentials {exponentials / MB:.1f} MB; {arguments.rounds} rounds."
    )


def report(
    arguments: ShardFlags, argv: Sequence[str], measured: list[dict[str, Any]]
) -> Iterator[str]:
    """Yield the lines of the table, and add their measurements to ``measured``."""
    yield "| way | S, s | T, s | S + T to kept, median (range) | predicted | MB between S and T |"
    yield rule(6)
    times = measure_times(arguments)
    for name, again in WAYS:
        own, kept = ([each.both for each in times[name, how]] for how in (again, False))
        products = [
            sum(TREATMENTS[name].products_of(kind, recompute=how) for kind in ("S", "T"))
            for how in (again, False)
        ]
        way, memory = f"{name}, {'recomputed' if again else 'kept'}", memory_of(argv, name, again)
        measured.append({"way": way, "S and T": times[name, again], "bytes": memory})
        yield row(
            way,
            *(
                f"{statistics.median(passes):.2f}"
                for passes in zip(*times[name, again], strict=True)
            ),
            harness.spread(harness.ratios(own, kept)),
            f"{products[0] / products[1]:.2f}",
            f"{memory['between'] / MB:.1f}, at most {memory['peak'] / MB:.1f}",
        )


def main() -> None:
    """Report, in a process whose allocator keeps freed memory, as in training."""
    argv = sys.argv[1:]
    arguments = read(argv, __doc__, ShardFlags)[ShardFlags]
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    if arguments.memory_of:
        print(json.dumps(measure_memory(arguments)))
    elif any(name not in os.environ for name in allocator()):
        os.execve(sys.executable, [sys.executable, __file__, *argv], os.environ | allocator())
    else:
        command = ["tools/vocab_recompute.py", *argv]
        run = harness.Run(command, "cpu", sizes(arguments), [], allocator_name())
        run.publish(report(arguments, argv, run.measured), arguments)


if __name__ == "__main__":
    main()
