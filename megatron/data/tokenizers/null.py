"""Numbers instead of words, for data that is ids already."""

from collections.abc import Sequence


class NullTokenizer:
    """Text that already is ids: decimal numbers separated by blanks.

    Args:
        vocab_size: ids below it are tokens; it is itself the end-of-document token.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        """The given size, and one for the end-of-document token."""
        return self._vocab_size + 1

    @property
    def eod(self) -> int:
        """The id after the last token."""
        return self._vocab_size

    def tokenize(self, text: str) -> list[int]:
        """The numbers in ``text``.

        Raises:
            ValueError: a word is no number, or no token.
        """
        ids = [int(word) for word in text.split()]
        if ids and not 0 <= min(ids) <= max(ids) <= self._vocab_size:
            raise ValueError(
                f"the ids {min(ids)}..{max(ids)} are not all from 0 to --vocab-size "
                f"{self._vocab_size}"
            )
        return ids

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers in every text."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The numbers, separated by blanks."""
        return " ".join(str(index) for index in ids)
