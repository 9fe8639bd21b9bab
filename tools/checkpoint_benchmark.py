#!/usr/bin/env python3
"""Time checkpoints beside plain torch.save and torch.load of the same bytes.

    python tools/checkpoint_benchmark.py --folder SCRATCH --gigabytes 2 --ranks 1 2 --rounds 5

Every rank has an equal share of the bytes. A round times each way once, the ways in an order that
changes from round to round, because machines drift:

    plain save   torch.save of a rank's share to a file of its own, and fsync
    save         a synchronous checkpoint
    stall        what training waits for an asynchronous one: the copy
    background   the asynchronous one until it is on disk
    plain load   torch.load of the files of the plain save
    load         the checkpoint into tensors that exist

A time is that of the slowest rank; CPU seconds are those of all ranks and threads together. Files
are read from the page cache if they fit there, in the plain way as in ours.
"""

import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    import torch
    import torch.distributed as dist
    import torch.multiprocessing

    from megatron.checkpoint import folder, storage
    from megatron.checkpoint.boxed import BoxedTensor
    from megatron.flags.command import read
    from megatron.flags.declare import flag, required
    from megatron.flags.ranges import COUNT, POSITIVE
    from megatron.parallel.box import Box, Piece
    from megatron.parallel.groups import ConnectedAxis
    from tools.benchmarking import harness
    from tools.benchmarking.harness import Taken, spread
    from tools.pages.tables import row, rule


HIDDEN = 2048
ROUNDS = "rounds.json"
WAYS = ("plain save", "save", "stall", "background", "plain load", "load")
BASES = {"save": "plain save", "stall": "plain save", "load": "plain load"}
"""The way that each way is compared with."""


Round = dict[str, Taken]
"""Seconds of every way until the slowest rank ended, and CPU seconds of all ranks together."""


def own_tensors(rank: int, ranks: int, gigabytes: float) -> dict[str, BoxedTensor]:
    """Return a rank's share: its rows of fp32 matrices of 4 h x h and h x h."""
    pair = 5 * HIDDEN * HIDDEN * 4
    found = {}
    for number in range(max(1, round(gigabytes * 1e9 / pair))):
        for name, rows in (("mlp", 4 * HIDDEN), ("attention", HIDDEN)):
            box = Box((rows // ranks * rank, 0), (rows // ranks, HIDDEN))
            tensor = torch.randn(box.shape)
            found[f"weight.{number}.{name}"] = BoxedTensor(
                tensor, (rows, HIDDEN), (Piece(box, (0, 0)),)
            )
    return found


class Bench:
    """The ways to save and load on one rank.

    Args:
        tensors: tensors of this rank.
        scratch: folder to write to.
        hosts: all ranks.
    """

    def __init__(
        self, tensors: Mapping[str, BoxedTensor], scratch: Path, hosts: ConnectedAxis
    ) -> None:
        self._tensors, self._scratch, self._hosts = dict(tensors), scratch, hosts
        self._plain_tensors = {n: t.as_subclass(torch.Tensor) for n, t in tensors.items()}
        self._copies: dict[str, BoxedTensor] = {}
        self._copy()  # a run allocates this memory before it trains

    def round(self, number: int) -> Round:
        """Time every way once."""
        saves: list[Callable[[], Round]] = [self._plain_saves, self._saves, self._copies_and_saves]
        loads: list[Callable[[], Round]] = [self._plain_loads, self._loads]
        found: Round = {}
        for ways in (saves, loads):
            for place in range(len(ways)):
                found |= ways[(number + place) % len(ways)]()
        self._clear()
        return found

    def _timed(self, work: Callable[[], object]) -> Taken:
        os.sync()  # writes that the way before has left behind
        self._hosts.barrier()
        _, own = harness.timed(work)
        everybody = self._hosts.all_gather_object(own)
        return Taken(max(s for s, _ in everybody), sum(c for _, c in everybody))

    def _plain_saves(self) -> Round:
        return {"plain save": self._timed(self._plain_save)}

    def _plain_save(self) -> None:
        with self._plain_file().open("wb") as file:
            torch.save(self._plain_tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def _saves(self) -> Round:
        return {"save": self._timed(lambda: self._save(1, self._tensors))}

    def _save(self, iteration: int, tensors: Mapping[str, BoxedTensor]) -> None:
        storage.write(self._scratch, iteration, tensors, {"iteration": iteration}, self._hosts)

    def _copies_and_saves(self) -> Round:
        stall = self._timed(self._copy)
        return {"stall": stall, "background": self._timed(lambda: self._save(2, self._copies))}

    def _copy(self) -> None:
        own = self._tensors.items()
        self._copies = {name: tensor.copied(self._copies.get(name)) for name, tensor in own}

    def _plain_loads(self) -> Round:
        return {"plain load": self._timed(lambda: torch.load(self._plain_file()))}

    def _loads(self) -> Round:
        return {"load": self._timed(self._load)}

    def _load(self) -> None:
        where = folder.folder_of(self._scratch, 1)
        problem = storage.check_files(where, self._hosts)
        assert problem is None, problem
        storage.read(where, self._tensors, self._hosts)

    def _clear(self) -> None:
        """Remove the files of a round, so that all ways write new files in the next round."""
        self._hosts.barrier()
        self._plain_file().unlink()
        if self._hosts.rank == 0:
            for iteration in (1, 2):
                folder.remove(self._scratch, iteration)

    def _plain_file(self) -> Path:
        return self._scratch / f"plain-{self._hosts.rank}.pt"


@dataclass(frozen=True)
class SpeedFlags(harness.RoundFlags):
    """What is written and read."""

    folder: Path = required("To write to and to empty.")
    gigabytes: float = flag(2.0, "Of all ranks together.", POSITIVE)
    ranks: tuple[int, ...] = flag((1, 2), "Ranks of each measurement.", COUNT)


def on_rank(rank: int, ranks: int, args: SpeedFlags, scratch: Path) -> None:
    """Time all rounds; rank 0 writes them to a file of ``scratch``."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)  # as torchrun sets it
    hosts = ConnectedAxis("world", rank, tuple(range(ranks)))
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=ranks
        )
    tensors = own_tensors(rank, ranks, args.gigabytes)
    size = sum(t.as_subclass(torch.Tensor).nbytes for t in tensors.values()) * ranks
    bench = Bench(tensors, scratch, hosts)
    rounds = [bench.round(number) for number in range(args.rounds)]
    if rank == 0:
        found = {"bytes": size, "ranks": ranks, "rounds": rounds}
        (scratch / ROUNDS).write_text(json.dumps(found), encoding="utf-8")
    if ranks > 1:
        dist.destroy_process_group()


def report(rounds: Sequence[Round]) -> Iterator[str]:
    """Yield a Markdown table of medians and ranges; ratios are formed within each round."""
    yield "| way | seconds, median (range) | CPU seconds | to plain, median (range) |"
    yield rule(4, "l")
    seconds = {way: [taken[way].seconds for taken in rounds] for way in WAYS}
    for way in WAYS:
        cpu = statistics.median(taken[way].cpu for taken in rounds)
        base = BASES.get(way)
        ratio = "" if base is None else spread(harness.ratios(seconds[way], seconds[base]))
        yield row(way, spread(seconds[way]), f"{cpu:.2f}", ratio)


def measure(ranks: int, args: SpeedFlags) -> dict[str, Any]:
    """Return the bytes, the ranks and all rounds of a job with so many ranks."""
    scratch = args.folder / f"checkpoint-benchmark-{os.getpid()}-{ranks}"
    scratch.mkdir(parents=True)
    try:
        torch.multiprocessing.spawn(on_rank, (ranks, args, scratch), nprocs=ranks)
        found: dict[str, Any] = json.loads((scratch / ROUNDS).read_text(encoding="utf-8"))
        return found
    finally:
        shutil.rmtree(scratch)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    words = sys.argv[1:] if arguments is None else arguments
    args = read(words, __doc__, SpeedFlags)[SpeedFlags]
    said = "A time is that of the slowest rank, CPU seconds are those of all ranks together."
    run = harness.Run(["tools/checkpoint_benchmark.py", *words], "cpu", said, [])

    def lines() -> Iterator[str]:
        for ranks in args.ranks:
            found = measure(ranks, args)
            run.measured.append(found)
            rounds = [{way: Taken(*own[way]) for way in WAYS} for own in found["rounds"]]
            counts = f"{ranks} rank{'s' * (ranks > 1)}, {args.rounds} rounds"
            yield f"{found['bytes'] / 1e9:.2f} GB on {counts}"
            yield from ("", *report(rounds), "")

    run.publish(lines(), args)


if __name__ == "__main__":
    main()
