"""Numbers instead of words, for data that is ids already."""

from collections.abc import Sequence

from megatron.data.tokenizers.interface import Tokenizer


class NullTokenizer(Tokenizer):
    """Text that already is ids: decimal numbers separated by blanks.

    Args:
        vocab_size: numbers below it are tokens; the number itself is the end-of-document token.
    """

    def __init__(self, vocab_size: int) -> None:
        self.eod, self.vocab_size = vocab_size, vocab_size + 1

    def tokenize(self, text: str) -> list[int]:
        """The numbers in ``text``.

        Raises:
            ValueError: a word is not a number, or its number is not an id.
        """
        ids = [int(word) for word in text.split()]
        if ids and not 0 <= min(ids) <= max(ids) <= self.eod:
            raise ValueError(
                f"the ids {min(ids)}..{max(ids)} are not all from 0 to {self.eod}, the last id of "
                "the vocabulary"
            )
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """The numbers, separated by blanks."""
        return " ".join(str(index) for index in ids)
