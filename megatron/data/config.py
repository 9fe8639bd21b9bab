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
    """What becomes of the documents in a sample, as in ``DataConfig``."""

    eod_token: int
    reset_attention_mask: bool
    reset_position_ids: bool


@dataclass(frozen=True)
class FillConfig:
    """Fill-in-the-middle: how often the middle of a text is moved to its end.

    Attributes:
        tokenizer: turns ids to text and back.
        rate: share of the documents in a sample.
        spm_rate: share among them with the suffix before the prefix.
        prefix_token: id before the prefix.
        middle_token: id before the middle.
        suffix_token: id before the suffix.
        pad_token: id that fills a sample that became shorter.
        end_token: id that ends a document.
        split_token: id that cuts a document into fragments; ``None``: it stays whole.
        fragment_rate: share of the fragments of a document that is chosen.
        no_prefix: a text that begins so stays as it is.
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
        weight: of the share; weights need not sum to one.
        prefix: names ``PREFIX.bin`` and ``PREFIX.idx``.
        begin: where it begins in the corpus, from 0 to 1.
        end: where it ends.
    """

    weight: float
    prefix: Path
    begin: float = 0.0
    end: float = 1.0


@dataclass(frozen=True)
class OwnPaths:
    """The corpora of splits that share none.

    Attributes:
        train: blend to train on.
        valid: blends of the validation sets, one or several; none: there is no validation.
        test: blend of the test set; none: there is no test.
        valid_names: of the validation sets, if there are several.
    """

    train: tuple[Share, ...]
    valid: tuple[tuple[Share, ...], ...] = ()
    test: tuple[Share, ...] = ()
    valid_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataConfig:
    """Corpus, split and sampling of the three datasets.

    Attributes:
        data_path: blend of which every split has a share.
        split: train, valid, test shares of the documents of every prefix, any positive scale.
        seq_length: tokens per sample s; each sample holds s + 1 tokens.
        seed: seed of the document and sample shuffles.
        eod_token: id of the end-of-document token.
        eod_mask_loss: no loss where the input token is the end of a document.
        reset_attention_mask: a token sees none of another document.
        reset_position_ids: positions begin anew with every document.
        mock_data: make samples up, without any corpus.
        added_entries: entries that the tokenizer adds to ``--vocab-size``.
        cache_path: folder of the sample indices; ``None`` puts them beside the data.
        own_paths: corpora of the splits, in place of shares of ``data_path``.
        full_validation: an evaluation reads every validation set whole, once.
        prefetch: read the next global batch while this one is trained on.
        fill: how middles of documents are moved to their ends; ``None``: they are not.
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
        """What becomes of the documents in a sample; ``None``: they are as one."""
        if not (self.reset_attention_mask or self.reset_position_ids):
            return None
        return DocumentsConfig(self.eod_token, self.reset_attention_mask, self.reset_position_ids)
