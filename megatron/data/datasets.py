"""The one call between a `DataSettings` and the train, validation and test samples."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from megatron.data.blend import BlendedDataset, normalised
from megatron.data.corpus_watch import WAY_OUT, CorpusWatch
from megatron.data.fill_in_the_middle import FilledDataset, FillTokens
from megatron.data.index_builder import IndexBuilder, load_index_builder, name_bus_errors
from megatron.data.indexed import IndexedDataset
from megatron.data.mock import MockDataset
from megatron.data.samples import GPTDataset, SampleDataset, build_sample_indices
from megatron.data.settings import DataSettings
from megatron.data.shares import Share
from megatron.data.tokenizers.build import build_tokenizer


@dataclass(frozen=True)
class Datasets:
    """One dataset per split; ``None`` where no samples were asked for.

    Attributes:
        valid: the validation set, or the first of several.
        more_valid: the other validation sets.
        corpora: the files of all corpora, as they are now.
    """

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None
    more_valid: tuple[SampleDataset, ...] = ()
    corpora: CorpusWatch = field(default_factory=CorpusWatch)


_ASKED_BY = ("--train-iters or --train-samples", "--eval-iters", "--eval-iters")
"""Flags that say how many samples training, validation and test read."""


class Part(NamedTuple):
    """A range of a corpus within a blend.

    Attributes:
        weight: weight of the corpus; the weights of a blend need not sum to one.
        source: the corpus.
        sequences: range of the corpus's sequences that belongs to the split.
    """

    weight: float
    source: IndexedDataset
    sequences: range


def build_datasets(
    config: DataSettings, num_samples: tuple[int, int | None, int], vocab_size: int
) -> Datasets:
    """Opens the corpora of a blend and indexes the samples of every split, or generates samples.

    Every rank calls this function with the same arguments and gets the same samples; the first
    caller builds the cached indices.

    Args:
        config: corpora, split and sampling.
        num_samples: samples that training, every validation set and test will read; ``None`` for
            validation: each sample of a set once.
        vocab_size: real vocabulary entries; every token id must be below it.

    Returns:
        Datasets with at least the samples asked for; text is repeated where it is too short.

    Raises:
        FileNotFoundError: a corpus is missing.
        ValueError: a corpus is damaged, a weight or the split is invalid, or a split that is
            asked for is too short for one sample.
    """
    if config.mock_data:
        return _mock_datasets(config, num_samples, vocab_size)
    if not config.blend and config.own_paths is None:
        raise ValueError("--data-path is empty; make sample data with tools/sample_data.py")
    builder = load_index_builder()

    def build(
        split: int, blends: Sequence[Sequence[Part]], count: int | None
    ) -> tuple[SampleDataset, ...]:
        if count == 0:
            return ()
        index = partial(_one_corpus, config, vocab_size, builder, _ASKED_BY[split])
        made = (_blended(parts, count, builder, index) for parts in blends)
        return tuple(_filled(config, dataset, split) for dataset in made)

    blends = list(_blends(config))
    sources = {part.source.prefix: part.source for blend in blends for p in blend for part in p}
    for source in sources.values():
        for path, arrays in source.mapped.items():
            name_bus_errors(builder, path, arrays, WAY_OUT)
    train, valid, test = map(build, itertools.count(), blends, num_samples)
    files = [path for source in sources.values() for path in source.files]
    corpora = CorpusWatch(files, _samples_of_epoch(blends[0], config.seq_length))
    return Datasets(_first(train), _first(valid), _first(test), valid[1:], corpora)


def _samples_of_epoch(blends: Sequence[Sequence[Part]], seq_length: int) -> int:
    """Return the samples of a blend after which one of its corpora is read once more."""
    found = [1 << 62]
    for parts in blends:
        total = math.fsum(part.weight for part in parts)
        for part in parts:
            lengths = part.source.lengths[part.sequences.start : part.sequences.stop]
            tokens = int(lengths.sum(dtype=np.int64))
            found.append(int(tokens / seq_length / (part.weight / total)))
    return max(1, min(found))


def _filled(config: DataSettings, dataset: SampleDataset, split: int) -> SampleDataset:
    """Return a dataset with the middles of its documents moved to their ends, if configured."""
    if not config.fill.fim_data:
        return dataset
    tokens = FillTokens.of(config.fill, build_tokenizer(config.tokenizer))
    return FilledDataset(dataset, config.fill, tokens, seed=config.seed, split=split)


def _first(datasets: Sequence[SampleDataset]) -> SampleDataset | None:
    return datasets[0] if datasets else None


def _blends(config: DataSettings) -> Iterator[list[list[Part]]]:
    """Yield the blends of training, of every validation set and of the test."""
    own = config.own_paths
    if own is not None:
        for blends in ((own.train,), own.valid, (own.test,)):
            yield [[_part(config, share) for share in blend] for blend in blends if blend]
        return
    sources = [IndexedDataset(prefix, config.flag_of(prefix)) for _, prefix in config.blend]
    ranges = [split_ranges(len(source), config.split.shares) for source in sources]
    weights = [weight for weight, _ in config.blend]
    for own_ranges in zip(*ranges, strict=True):
        yield [[Part(*part) for part in zip(weights, sources, own_ranges, strict=True)]]


def _part(config: DataSettings, share: Share) -> Part:
    """Open the corpus of a share; its bounds are rounded as Megatron-LM rounds a split."""
    source = IndexedDataset(share.prefix, config.flag_of(share.prefix))
    begin, end = (round(mark * len(source)) for mark in (share.begin, share.end))
    return Part(share.weight, source, range(begin, end))


def _blended(
    parts: Sequence[Part],
    num_samples: int | None,
    builder: IndexBuilder,
    index: Callable[[Part, int | None], GPTDataset],
) -> SampleDataset:
    """Return the dataset of a blend.

    ``index`` makes the dataset of a part with a number of samples. ``num_samples`` may be ``None``
    (every sample once) only where the blend has a single corpus.
    """
    if len(parts) == 1:
        return index(parts[0], num_samples)
    assert num_samples is not None, "a blend has no end"
    shares = normalised([part.weight for part in parts])
    dataset_index, within = builder.blend_index(shares, num_samples)
    draws = np.bincount(dataset_index, minlength=len(parts)).tolist()
    # Every corpus is asked for at least one sample, so that a corpus that is too short is always
    # refused.
    datasets = [index(part, max(drawn, 1)) for part, drawn in zip(parts, draws, strict=True)]
    return BlendedDataset(datasets, dataset_index, within)


def _mock_datasets(
    config: DataSettings, num_samples: tuple[int, int | None, int], vocab_size: int
) -> Datasets:
    masked = config.eod_token if config.eod_mask_loss else None

    def build(split: int) -> SampleDataset | None:
        count = num_samples[split]
        assert count is not None, "samples that are made up have no end"
        if count == 0:
            return None
        return MockDataset(
            count,
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
    config: DataSettings,
    vocab_size: int,
    builder: IndexBuilder,
    asked_by: str,
    part: Part,
    num_samples: int | None,
) -> GPTDataset:
    cache = config.data_cache_path or part.source.prefix.parent / "sample_indices"
    indices = build_sample_indices(
        part.source,
        part.sequences,
        config.seq_length,
        num_samples,
        config.seed,
        cache,
        builder,
        asked_by,
    )
    masked = config.eod_token if config.eod_mask_loss else None
    return GPTDataset(part.source, indices, config.seq_length, vocab_size, masked)
