"""The one call between a `DataConfig` and the train, validation and test samples."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.blend import BlendedDataset, normalised
from megatron.data.config import DataConfig
from megatron.data.index_builder import IndexBuilder, load_index_builder
from megatron.data.indexed import IndexedDataset
from megatron.data.mock import MockDataset
from megatron.data.samples import GPTDataset, SampleDataset, build_sample_indices
from megatron.native.files import cache_root


@dataclass(frozen=True)
class Datasets:
    """One dataset per split; ``None`` where no samples were asked for."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


def build_datasets(
    config: DataConfig, num_samples: tuple[int, int, int], vocab_size: int
) -> Datasets:
    """Opens the corpora of a blend and indexes the samples of every split, or makes samples up.

    Every rank calls it with the same arguments and gets the same samples; the first caller builds
    the cached indices.

    Args:
        config: corpora, split and sampling.
        num_samples: samples that training, validation and test will read.
        vocab_size: real vocabulary entries; every token id must be below it.

    Returns:
        Datasets of at least the samples asked for, repeating the text if need be.

    Raises:
        FileNotFoundError: a corpus is missing.
        ValueError: a corpus is damaged, a weight or the split is invalid, or a split that is
            asked for is too short for one sample.
    """
    if config.mock_data:
        return _mock_datasets(config, num_samples, vocab_size)
    if not config.data_path:
        raise ValueError("--data-path is empty; make sample data with tools/sample_data.py")
    assert min(num_samples) >= 0
    weights = [weight for weight, _ in config.data_path]
    shares = normalised(weights)
    sources = [IndexedDataset(prefix) for _, prefix in config.data_path]
    ranges = [split_ranges(len(source), config.split) for source in sources]
    builder = load_index_builder(cache_root())

    def build(split: int) -> SampleDataset | None:
        count = num_samples[split]
        if count == 0:
            return None
        parts = [(source, parts[split]) for source, parts in zip(sources, ranges, strict=True)]
        if len(parts) == 1:
            return _one_corpus(config, *parts[0], count, vocab_size, builder)
        dataset_index, within = builder.blend_index(shares, count)
        draws = np.bincount(dataset_index, minlength=len(parts)).tolist()
        # At least one sample, so that a corpus that is too short is refused whatever the number of
        # samples.
        datasets = [
            _one_corpus(config, *part, max(drawn, 1), vocab_size, builder)
            for part, drawn in zip(parts, draws, strict=True)
        ]
        return BlendedDataset(datasets, dataset_index, within)

    return Datasets(build(0), build(1), build(2))


def _mock_datasets(
    config: DataConfig, num_samples: tuple[int, int, int], vocab_size: int
) -> Datasets:
    masked = config.eod_token if config.eod_mask_loss else None

    def build(split: int) -> SampleDataset | None:
        if num_samples[split] == 0:
            return None
        return MockDataset(
            num_samples[split],
            config.seq_length,
            vocab_size,
            config.eod_token,
            seed=config.seed,
            split=split,
            masked_token=masked,
        )

    return Datasets(build(0), build(1), build(2))


def split_ranges(num_sequences: int, split: Sequence[float]) -> list[range]:
    """Cuts the sequences of a corpus into consecutive ranges, rounded as Megatron-LM does.

    Args:
        num_sequences: sequences of the corpus.
        split: shares of train, valid and test, on any scale.

    Returns:
        One range per share; together they cover the corpus.

    Raises:
        ValueError: a share is negative or not finite, or all are zero.
    """
    total = math.fsum(split)
    if not math.isfinite(total) or min(split) < 0 or total == 0:
        raise ValueError(
            f"--split {','.join(f'{share:g}' for share in split)}: shares must be at least 0 and "
            "not all 0, for example 949,50,1"
        )
    ends = itertools.accumulate((share / total for share in split), initial=0.0)
    bounds = [round(end * num_sequences) for end in ends]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def _one_corpus(
    config: DataConfig,
    source: IndexedDataset,
    sequences: range,
    num_samples: int,
    vocab_size: int,
    builder: IndexBuilder,
) -> GPTDataset:
    cache = config.cache_path or _default_cache(source.prefix)
    indices = build_sample_indices(
        source, sequences, config.seq_length, num_samples, config.seed, cache, builder
    )
    masked = config.eod_token if config.eod_mask_loss else None
    return GPTDataset(source, indices, config.seq_length, vocab_size, masked)


def _default_cache(prefix: Path) -> Path:
    return prefix.parent / "sample_indices"
