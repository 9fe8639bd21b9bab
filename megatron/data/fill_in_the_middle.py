"""Fill-in-the-middle: the middle of a text comes last, so that a model learns to fill gaps.

A document is cut at two random places, and its parts are put behind tokens that name them (arXiv
2207.14255): prefix, suffix, middle (PSM), or suffix, prefix, middle (SPM). As in Megatron-LM, the
documents of a sample are rearranged when the sample is read; the sample keeps its length. Every
random choice follows from the seed, the split and the number of the sample. So a resumed run, or a
run on another grid of ranks, reads the same samples.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatron.data.config import FillConfig
from megatron.data.samples import SampleDataset
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.interface import Tokenizer


class FilledDataset:
    """A `SampleDataset` with the middles of documents moved to their ends.

    Args:
        dataset: the samples as they are in the corpus.
        config: how many documents are rearranged, and with which tokens.
        seed: seed of the run.
        split: number of the split; every split makes random choices of its own.
    """

    def __init__(
        self, dataset: SampleDataset, config: FillConfig, *, seed: int, split: int
    ) -> None:
        self.seq_length = dataset.seq_length
        self.masked_token = dataset.masked_token
        self._dataset = dataset
        self._config = config
        self._tokenizer = build_tokenizer(config.tokenizer)
        self._seeds = (seed, split)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int, out: NDArray[np.int64]) -> None:
        """Writes sample ``index`` into ``out`` [s + 1], cut off or padded to s + 1 tokens."""
        self._dataset.read(index, out)
        # NumPy's legacy generator, because its stream never changes. Its seeds have 32 bits each.
        high, low = divmod(index, 1 << 32)
        random = np.random.RandomState([*self._seeds, low, high])
        moved = rearranged(out.tolist(), self._config, self._tokenizer, random)[: len(out)]
        out[: len(moved)] = moved
        out[len(moved) :] = self._config.pad_token


def rearranged(
    tokens: list[int], config: FillConfig, tokenizer: Tokenizer, random: np.random.RandomState
) -> list[int]:
    """Return a sample's tokens with the middles of some documents moved to their ends."""
    found: list[int] = []
    for document, end in _parts(tokens, config.end_token):
        pieces = list(_parts(document, config.split_token))
        if len(pieces) == 1:
            found += _one(document, config.rate, config, tokenizer, random) + end
            continue
        rate = config.fragment_rate if random.random_sample() < config.rate else 0.0
        for piece, mark in pieces:
            found += _one(piece, rate, config, tokenizer, random) + mark
        found += end
    return found


def _parts(tokens: list[int], mark: int | None) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each run of tokens between marks, with the mark that ends it (the last has none)."""
    begin = 0
    for place, token in enumerate(tokens):
        if token == mark:
            yield tokens[begin:place], [token]
            begin = place + 1
    yield tokens[begin:], []


def _one(
    tokens: list[int],
    rate: float,
    config: FillConfig,
    tokenizer: Tokenizer,
    random: np.random.RandomState,
) -> list[int]:
    """Return a piece of text with its middle moved to its end, or unchanged."""
    if not tokens or random.random_sample() >= rate:
        return tokens
    text = tokenizer.detokenize(tokens)
    if config.no_prefix and text.startswith(config.no_prefix):
        return tokens
    first, second = sorted(random.randint(len(text) + 1, size=2).tolist())
    parts = tokenizer.tokenize_all([text[:first], text[first:second], text[second:]])
    prefix, middle, suffix = parts
    if random.random_sample() < config.spm_rate:
        head = [config.prefix_token, config.suffix_token, *suffix, config.middle_token]
        return [*head, *prefix, *middle]
    head = [config.prefix_token, *prefix, config.suffix_token, *suffix, config.middle_token]
    return [*head, *middle]
