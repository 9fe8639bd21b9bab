"""Fill-in-the-middle: the middle of a text comes last, so that a model learns to fill gaps.

A document is cut at two random places, and its parts are put behind tokens that name them (arXiv
2207.14255): prefix, suffix, middle (PSM), or suffix, prefix, middle (SPM). As in Megatron-LM, the
documents of a sample are rearranged when the sample is read; the sample keeps its length. Every
random choice follows from the seed, the split and the number of the sample. So a resumed run, or a
run on another grid of ranks, reads the same samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.data.samples import SampleDataset
from megatron.data.settings import FillSettings
from megatron.data.tokenizers.interface import Tokenizer
from megatron.flags.declare import option_of


@dataclass(frozen=True)
class FillTokens:
    """A tokenizer, and the ids of the tokens that fill-in-the-middle puts into a text.

    Attributes:
        tokenizer: turns ids into text and back.
        prefix: id before the prefix.
        middle: id before the middle.
        suffix: id before the suffix.
        pad: id that fills a sample that became shorter.
        end: id that ends a document.
        split: id that cuts a document into fragments; ``None``: documents stay whole.
    """

    tokenizer: Tokenizer
    prefix: int
    middle: int
    suffix: int
    pad: int
    end: int
    split: int | None

    @classmethod
    def of(cls, settings: FillSettings, tokenizer: Tokenizer) -> "FillTokens":
        """Return the ids of the tokens that the settings name.

        Raises:
            ValueError: the tokenizer lacks a token.
        """

        def id_of(name: str) -> int:
            return _id_of(getattr(settings, name), option_of(name), tokenizer)

        return cls(
            tokenizer,
            prefix=id_of("fim_prefix_token"),
            middle=id_of("fim_middle_token"),
            suffix=id_of("fim_suffix_token"),
            pad=id_of("fim_pad_token"),
            end=tokenizer.eod if settings.fim_eod_token is None else id_of("fim_eod_token"),
            split=None if settings.fim_split_sample is None else id_of("fim_split_sample"),
        )


def _id_of(token: str, option: str, tokenizer: Tokenizer) -> int:
    ids = tokenizer.tokenize(token)
    if len(ids) != 1 or tokenizer.detokenize(ids) != token:
        raise ValueError(
            f"{option} {token}: the tokenizer has no such token; add it to its folder "
            "(tokenizer.add_special_tokens, save_pretrained), or name one that it has"
        )
    return ids[0]


class FilledDataset:
    """A `SampleDataset` with the middles of documents moved to their ends.

    Args:
        dataset: the samples as they are in the corpus.
        settings: how many documents are rearranged.
        tokens: the tokens that are put between their parts.
        seed: seed of the run.
        split: number of the split; every split makes random choices of its own.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        settings: FillSettings,
        tokens: FillTokens,
        *,
        seed: int,
        split: int,
    ) -> None:
        self.seq_length = dataset.seq_length
        self.masked_token = dataset.masked_token
        self._dataset = dataset
        self._settings, self._tokens = settings, tokens
        self._seeds = (seed, split)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int, out: NDArray[np.int64]) -> None:
        """Writes sample ``index`` into ``out`` [s + 1], cut off or padded to s + 1 tokens."""
        self._dataset.read(index, out)
        # NumPy's legacy generator, because its stream never changes. Its seeds have 32 bits each.
        high, low = divmod(index, 1 << 32)
        random = np.random.RandomState([*self._seeds, low, high])
        moved = rearranged(out.tolist(), self._settings, self._tokens, random)[: len(out)]
        out[: len(moved)] = moved
        out[len(moved) :] = self._tokens.pad


def rearranged(
    tokens: list[int], settings: FillSettings, ids: FillTokens, random: np.random.RandomState
) -> list[int]:
    """Return a sample's tokens with the middles of some documents moved to their ends."""
    found: list[int] = []
    for document, end in _parts(tokens, ids.end):
        pieces = list(_parts(document, ids.split))
        if len(pieces) == 1:
            found += _one(document, settings.fim_rate, settings, ids, random) + end
            continue
        rate = settings.fragment_rate if random.random_sample() < settings.fim_rate else 0.0
        for piece, mark in pieces:
            found += _one(piece, rate, settings, ids, random) + mark
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
    settings: FillSettings,
    ids: FillTokens,
    random: np.random.RandomState,
) -> list[int]:
    """Return a piece of text with its middle moved to its end, or unchanged."""
    if not tokens or random.random_sample() >= rate:
        return tokens
    text = ids.tokenizer.detokenize(tokens)
    if settings.fim_no_prefix and text.startswith(settings.fim_no_prefix):
        return tokens
    first, second = sorted(random.randint(len(text) + 1, size=2).tolist())
    parts = ids.tokenizer.tokenize_all([text[:first], text[first:second], text[second:]])
    prefix, middle, suffix = parts
    if random.random_sample() < settings.fim_spm_rate:
        head = [ids.prefix, ids.suffix, *suffix, ids.middle]
        return [*head, *prefix, *middle]
    head = [ids.prefix, *prefix, ids.suffix, *suffix, ids.middle]
    return [*head, *middle]
