"""The interface of all tokenizers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence


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
