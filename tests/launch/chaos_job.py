"""``pretrain_gpt.py`` that leaves a record of every global batch: who read which samples.

The records of a process lie in a file of its own, a line for every batch. Training reads a batch
before it uses it, so what a killed process read last may not have been trained on.
"""

import json
import os
import sys
from pathlib import Path

from megatron.data.microbatch import Microbatch, MicrobatchLoader
from megatron.data.mock import MockDataset
from pretrain_gpt import main

RECORDS = "CHAOS_RECORDS"
"""Variable with the folder of the records."""


def record() -> None:
    """Record every batch that this process reads for training."""
    folder, rank = Path(os.environ[RECORDS]), int(os.environ["RANK"])
    samples: list[int] = []
    read, next_batch = MockDataset.read, MicrobatchLoader.next_batch

    def recorded_read(self: MockDataset, index: int, *args: object) -> None:
        samples.append(index)
        read(self, index, *args)  # type: ignore[arg-type] # handed on as they came

    def recorded_batch(self: MicrobatchLoader) -> list[Microbatch]:
        first = self.consumed_samples
        samples.clear()
        batch = next_batch(self)
        line = json.dumps({"rank": rank, "first": first, "samples": samples})
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(line + "\n")
        return batch

    setattr(MockDataset, read.__name__, recorded_read)
    setattr(MicrobatchLoader, next_batch.__name__, recorded_batch)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    record()
    main()
