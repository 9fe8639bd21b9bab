"""The interface of all tokenizers, and the flags that describe a tokenizer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class Tokenizer(ABC):
    """A tokenizer for data preparation and training.

    Attributes:
        vocab_size: number of ids, the end-of-document token included.
        eod: id of the end-of-document token.
    """

    vocab_size: int
    eod: int

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, without an end-of-document token."""

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of every text; some libraries encode many texts together faster."""
        return [self.tokenize(text) for text in texts]

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids that `tokenize` made."""


@dataclass(frozen=True)
class TokenizerConfig:
    """A tokenizer as its flags describe it; each attribute is the flag of its name.

    Attributes:
        vocab_size: for a ``NullTokenizer`` the number of its tokens; for a ``TikTokenizer`` the
            most ids, special tokens included; for all other types the most entries that the model
            may have.
    """

    tokenizer_type: str
    tokenizer_model: Path | None = None
    vocab_size: int | None = None
    vocab_file: Path | None = None
    merge_file: Path | None = None
    tiktoken_pattern: str = "v2"
    tiktoken_num_special_tokens: int = 1000
    tokenizer_special_tokens: tuple[str, ...] = ()
    tokenizer_hf_include_special_tokens: bool = False
    vocab_extra_ids: int = 0
