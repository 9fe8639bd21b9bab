#!/usr/bin/env python3
"""Write the golden files with megatron-core's own builder.

They were made with megatron-core 0.16.1, which the tests do not need. To make them anew, install
that package into an environment without this project, and run there:

    python tests/data/golden/make.py

It takes ``raw_text.numbers`` through the same steps as Megatron-LM's tools/preprocess_data.py with
--append-eod. The package's ``IndexedDataset`` reads the prefixes that it is given.
"""

import importlib
import sys
from pathlib import Path

import numpy as np


def numbers(documents: int, vocabulary: int) -> list[list[str]]:
    """``raw_text.numbers``, which needs this project, with every text as a list."""

    def text(seed: int) -> str:
        return " ".join(str((seed * 7919 + 31 * n) % vocabulary) for n in range(seed * seed % 13))

    return [
        [text(seed), "", text(seed + 1)] if seed % 5 == 0 else [text(seed)]
        for seed in range(documents)
    ]


def main() -> None:
    """Write two pairs and one merged of three; read the given prefixes."""
    mcore = importlib.import_module("megatron.core.datasets.indexed_dataset")
    here = Path(__file__).resolve().parent
    for vocabulary in (1000, 70000):
        prefix = here / "megatron_core_0.16.1" / f"{vocabulary}_text_document"
        dtype = mcore.DType.optimal_dtype(vocabulary + 1)
        builder = mcore.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for sentences in numbers(40, vocabulary):
            found = [[int(word) for word in sentence.split()] for sentence in sentences]
            found = [ids for ids in found if ids]
            if found:
                found[-1].append(vocabulary)
            builder.add_document([i for ids in found for i in ids], [len(ids) for ids in found])
        builder.finalize(f"{prefix}.idx")
    once = here / "megatron_core_0.16.1" / "1000_text_document"
    merged = mcore.IndexedDatasetBuilder(f"{once}_three_times.bin", dtype=np.uint16)
    for _ in range(3):
        merged.add_index(str(once))
    merged.finalize(f"{once}_three_times.idx")
    for other in sys.argv[1:]:
        dataset = mcore.IndexedDataset(other)
        tokens = sum(len(np.asarray(dataset[n])) for n in range(len(dataset)))
        print(f"{other}: {len(dataset)} sequences, {tokens} tokens", dataset.index.dtype.__name__)


if __name__ == "__main__":
    main()
