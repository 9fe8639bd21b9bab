"""Settings of the corpus and of its samples."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from megatron.data.tokenizers.interface import TokenizerConfig

Blend = tuple[tuple[float, Path], ...]
"""Weights and prefixes of corpora; a prefix names ``PREFIX.bin`` and ``PREFIX.idx``, and weights
need not sum to one."""


EvaluationSet = Literal["validation", "test"]
"""A part of the data that is only evaluated."""


@dataclass(frozen=True)
class DocumentsConfig:
    """How the documents within a sample are kept apart; ``DataConfig`` explains the fields."""

    eod_token: int
    reset_attention_mask: bool
    reset_position_ids: bool


@dataclass(frozen=True)
class FillConfig:
    """Fill-in-the-middle: how often the middle of a text is moved to its end.

    Attributes:
        tokenizer: turns ids into text and back.
        rate: share of a sample's documents that are rearranged.
        spm_rate: share of the rearranged documents with the suffix before the prefix.
        prefix_token: id before the prefix.
        middle_token: id before the middle.
        suffix_token: id before the suffix.
        pad_token: id that fills a sample that became shorter.
        end_token: id that ends a document.
        split_token: id that cuts a document into fragments; ``None``: documents stay whole.
        fragment_rate: share of the fragments that are rearranged in a chosen document.
        no_prefix: a text that begins with this string stays as it is.
    """

    tokenizer: TokenizerConfig
    rate: float
    spm_rate: float
    prefix_token: int
    middle_token: int
    suffix_token: int
    pad_token: int
    end_token: int
    split_token: int | None = None
    fragment_rate: float = 0.0
    no_prefix: str | None = None


class Share(NamedTuple):
    """A share of a corpus within a blend.

    Attributes:
        weight: weight of the share; the weights of a blend need not sum to one.
        prefix: the corpus ``PREFIX.bin`` and ``PREFIX.idx``.
        begin: where the share begins, as a fraction of the corpus from 0 to 1.
        end: where the share ends, as a fraction of the corpus.
    """

    weight: float
    prefix: Path
    begin: float = 0.0
    end: float = 1.0


@dataclass(frozen=True)
class OwnPaths:
    """The corpora when training, validation and test have corpora of their own.

    Attributes:
        train: blend to train on.
        valid: blends of the validation sets, one blend per set; empty: there is no validation.
        test: blend of the test set; empty: there is no test.
        valid_names: names of the validation sets, if there are several.
    """

    train: tuple[Share, ...]
    valid: tuple[tuple[Share, ...], ...] = ()
    test: tuple[Share, ...] = ()
    valid_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataConfig:
    """Corpus, split and sampling of the three datasets.

    Attributes:
        data_path: blend that train, valid and test divide among themselves.
        split: shares of every corpus's documents for train, valid, test, on any positive scale.
        seq_length: tokens per sample s; each sample holds s + 1 tokens.
        seed: seed of the document and sample shuffles.
        eod_token: id of the end-of-document token.
        eod_mask_loss: no loss where the input token is the end of a document.
        reset_attention_mask: a token attends only to tokens of its own document.
        reset_position_ids: positions begin anew with every document.
        mock_data: generate samples instead of reading a corpus.
        added_entries: entries that the tokenizer adds to ``--vocab-size``.
        cache_path: folder of the sample indices; ``None`` puts them beside the data.
        own_paths: blends for every split, used in place of ``data_path``.
        full_validation: every evaluation reads each validation set whole, once.
        prefetch: read the next global batch while the model trains on the current batch.
        fill: how middles of documents are moved to their ends; ``None``: they stay in place.
        named_by: the flag and the prefix of every corpus, for messages.
    """

    data_path: Blend
    split: tuple[float, float, float]
    seq_length: int
    seed: int
    eod_token: int
    eod_mask_loss: bool = False
    reset_attention_mask: bool = False
    reset_position_ids: bool = False
    mock_data: bool = False
    added_entries: int = 0
    cache_path: Path | None = None
    own_paths: OwnPaths | None = None
    full_validation: bool = False
    prefetch: bool = False
    fill: FillConfig | None = None
    named_by: tuple[tuple[str, Path], ...] = ()

    def flag_of(self, prefix: Path) -> str:
        """Return the flag that names a corpus."""
        return next((flag for flag, named in self.named_by if named == prefix), "--data-path")

    @property
    def documents(self) -> DocumentsConfig | None:
        """How the documents within a sample are kept apart; ``None``: they are not."""
        if not (self.reset_attention_mask or self.reset_position_ids):
            return None
        return DocumentsConfig(self.eod_token, self.reset_attention_mask, self.reset_position_ids)
