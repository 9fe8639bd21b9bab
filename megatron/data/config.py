"""Settings of the corpus and of its samples."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DocumentsConfig:
    """What becomes of the documents in a sample.

    Attributes:
        eod_token: id of the token that ends a document.
        reset_attention_mask: a token sees none of another document.
        reset_position_ids: positions begin anew with every document.
    """

    eod_token: int
    reset_attention_mask: bool
    reset_position_ids: bool


@dataclass(frozen=True)
class DataConfig:
    """Corpus, split and sampling of the three datasets.

    Attributes:
        data_path: blend as ``(weight, prefix)`` pairs; a prefix names ``PREFIX.bin`` and
            ``PREFIX.idx``. Weights need not sum to one.
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
    """

    data_path: tuple[tuple[float, Path], ...]
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

    @property
    def documents(self) -> DocumentsConfig | None:
        """What becomes of the documents in a sample; ``None``: they are as one."""
        if not (self.reset_attention_mask or self.reset_position_ids):
            return None
        return DocumentsConfig(self.eod_token, self.reset_attention_mask, self.reset_position_ids)
