"""Which rows of the vocabulary a rank holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VocabularyShard:
    """A contiguous part of the padded vocabulary.

    Attributes:
        vocab_size: real entries V of the whole vocabulary.
        first_row: vocabulary id of the shard's first row.
        rows: rows of the shard, padding included; the same on every rank.
    """

    vocab_size: int
    first_row: int
    rows: int

    @property
    def real_rows(self) -> int:
        """Number of rows that are real entries; the remaining rows, at the end, are padding."""
        return max(0, min(self.rows, self.vocab_size - self.first_row))

    @property
    def first_real_row(self) -> int:
        """The first row, or the end of the real vocabulary if the shard is only padding."""
        return min(self.first_row, self.vocab_size)

    @classmethod
    def of(cls, vocab_size: int, padded_size: int, index: int, shards: int) -> "VocabularyShard":
        """Return shard ``index`` of the padded vocabulary, cut into ``shards`` equal shards."""
        assert padded_size % shards == 0, f"{padded_size} rows do not split into {shards} shards"
        rows = padded_size // shards
        return cls(vocab_size, index * rows, rows)
