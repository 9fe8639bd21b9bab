"""Which queries of a rank see which keys of another, while keys pass along a ring; all on the host.

The keys of a rank are in an early and a late chunk of the sequence (``parallel.context``), and so
are its queries. Without windows, documents, caps and slopes a step of the ring is one call of the
kernels. Otherwise a square of queries and keys is cut in four again and again, while only a part of
it can be seen. If nothing of a square is seen, it costs nothing. If all of it is seen, it is a
plain product. Only the small squares at a bound need a mask.

With documents and windows, some steps have no work on any rank. All ranks know the documents of
whole samples on the host, so all ranks skip the same steps.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeAlias

from megatron.kernels.documents import Documents
from megatron.kernels.reference.partial_attention import PartView
from megatron.kernels.scores import Scores
from megatron.parallel.context import chunks_of

BLOCK: Final = 256
"""Positions of a square at a bound, which is not cut further."""

SCORED_BLOCK: Final = 1024
"""Positions of a square that is seen as a whole, but has caps or slopes: kernels hold a matrix of
its scores in memory."""

Seen: TypeAlias = Literal["nothing", "everything", "causal", "some"]
"""How much of some keys some queries see; ``causal``: each sees the keys up to its own."""


class Piece(NamedTuple):
    """Queries of this rank, and keys that it holds in this step of the ring.

    Attributes:
        queries: their indices among the rank's queries.
        keys: their indices among the keys.
        is_causal: as in ``AttentionPart``.
        view: as in ``AttentionPart``.
    """

    queries: slice
    keys: slice
    is_causal: bool = False
    view: PartView | None = None


class _Span(NamedTuple):
    """Consecutive positions of a sequence: from ``first`` to before ``end``; they lie at ``at``."""

    first: int
    end: int
    at: int

    @property
    def indices(self) -> slice:
        return slice(self.at, self.at + self.end - self.first)

    def halves(self) -> "tuple[_Span, _Span]":
        middle = (self.first + self.end) // 2
        return (
            _Span(self.first, middle, self.at),
            _Span(middle, self.end, self.at + middle - self.first),
        )


@dataclass(frozen=True, eq=False)
class RingSight:
    """Which keys queries see, while the keys pass along a ring of ranks.

    Attributes:
        rank: this rank's place on the ring.
        size: ranks of the ring.
        tokens: of every sample on each rank, u.
        scores: how products of queries and keys become scores.
        documents: of whole samples; ``None``: samples are not divided.
    """

    rank: int
    size: int
    tokens: int
    scores: Scores
    documents: Documents | None
    _pieces: dict[int, list[Piece]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def _first_of_samples(self) -> list[list[int]]:
        """For every sample the positions at which documents begin, position by position."""
        assert self.documents is not None
        first: list[list[int]] = self.documents.host_first_bs.tolist()
        return first

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps in which some rank sees something, ascending.

        Step 0 is that of a rank's own keys. In step i a rank has the keys of the rank i places
        before. The result is the same on all ranks.
        """
        if self.scores.window is None and self.documents is None:
            return tuple(range(self.size))
        return tuple(
            step
            for step in range(self.size)
            if any(
                self._seen(queries, keys) != "nothing"
                for rank in range(self.size)
                for queries in self._spans(rank)
                for keys in self._spans((rank - step) % self.size)
            )
        )

    @classmethod
    def of(
        cls, rank: int, size: int, tokens: int, scores: Scores, documents: Documents | None
    ) -> "RingSight":
        """Return the sight for these attributes; all layers of a microbatch share it."""
        if documents is None:
            return cls(rank, size, tokens, scores, None)
        key, derived = (cls, rank, size, tokens, scores), documents.derived
        if key not in derived:
            derived[key] = cls(rank, size, tokens, scores, documents)
        own: RingSight = derived[key]
        return own

    def pieces(self, step: int) -> list[Piece]:
        """Return the pieces of a step. In step 0 a query's own key comes before its other keys."""
        if step not in self._pieces:
            self._pieces[step] = self._made(step)
        return self._pieces[step]

    def _made(self, step: int) -> list[Piece]:
        if self.scores.are_products and self.documents is None:
            return [self._as_a_whole(step)]
        queries, keys = self._spans(self.rank), self._spans((self.rank - step) % self.size)
        pairs = [(q, k) for q in queries for k in keys]
        # A query's own key first: two parts of which a query sees nothing would add up to NaN.
        pairs.sort(key=lambda pair: pair[0].first != pair[1].first)
        return [piece for pair in pairs for piece in self._cut(*pair)]

    def _as_a_whole(self, step: int) -> Piece:
        """Return the single piece of a step without windows, documents, caps and slopes."""
        everything, half = slice(0, self.tokens), self.tokens // 2
        if step == 0:
            return Piece(everything, everything, is_causal=True)
        if step <= self.rank:  # the keys are of the lower rank ``rank - step``
            return Piece(everything, slice(0, half))
        return Piece(slice(half, self.tokens), everything)

    def _spans(self, rank: int) -> list[_Span]:
        """Return the two chunks of a rank."""
        chunk = self.tokens // 2
        return [
            _Span(number * chunk, (number + 1) * chunk, place * chunk)
            for place, number in enumerate(chunks_of(rank, self.size))
        ]

    def _cut(self, queries: _Span, keys: _Span) -> list[Piece]:
        """Return the pieces of a square of queries and keys."""
        seen, length = self._seen(queries, keys), queries.end - queries.first
        if seen == "nothing":
            return []
        is_plain = self.scores.asked <= {"window"}
        if is_plain and seen != "some":
            return [Piece(queries.indices, keys.indices, is_causal=seen == "causal")]
        if length <= (BLOCK if seen == "some" else SCORED_BLOCK):
            return [Piece(queries.indices, keys.indices, view=self._view(queries, keys))]
        (early, late), (before, behind) = queries.halves(), keys.halves()
        quarters = (early, before), (late, behind), (late, before), (early, behind)
        return [piece for quarter in quarters for piece in self._cut(*quarter)]

    def _seen(self, queries: _Span, keys: _Span) -> Seen:
        """Return how much the queries of all samples see of the keys."""
        window, (earliest, latest) = self.scores.window, self._first_keys(queries)
        if keys.first >= queries.end or keys.end <= earliest:
            return "nothing"
        if window is not None and queries.first - (keys.end - 1) > window:
            return "nothing"
        if latest > keys.first:
            return "some"
        if window is not None and queries.end - 1 - keys.first > window:
            return "some"
        if keys.end - 1 <= queries.first:
            return "everything"
        return "causal" if keys[:2] == queries[:2] else "some"

    def _first_keys(self, queries: _Span) -> tuple[int, int]:
        """Return the earliest and the latest of the positions at which their documents begin."""
        if self.documents is None:
            return 0, 0
        samples = self._first_of_samples  # within a sample beginnings ascend
        return (
            min(first[queries.first] for first in samples),
            max(first[queries.end - 1] for first in samples),
        )

    def _view(self, queries: _Span, keys: _Span) -> PartView:
        first_bs = None
        if self.documents is not None:
            first_bs = self.documents.first_bs[:, queries.first : queries.end]
        return PartView(queries.first, keys.first, self.scores, first_bs)
