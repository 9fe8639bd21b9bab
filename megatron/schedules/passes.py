"""A pass is one unit of work of one microbatch on one rank: ``F3``, ``F3.1`` or ``F3.1/2``.

A microbatch may be cut along its sequence into slices (Seq1F1B, arXiv 2406.03488; SlimPipe, arXiv
2504.14519). Every pass is then of one slice.
"""

import re
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, Protocol, get_args

PassKind = Literal["F", "R", "B", "W", "S", "E", "T", "IF", "IB", "U"]
"""F forward; R layers computed again for their backward; B backward (input gradient); W weight
gradient; S and T output layer before and after its barrier; IF and IB input layer forward and
backward (arXiv 2411.05288, section 4). E is the middle pass of the naive treatment: it computes the
exponentials, between the barriers of the maximum and the sum. U, which stands in programs but not
in plans, updates a bucket of parameters (``buckets``)."""

PASS_KINDS: Final[tuple[PassKind, ...]] = get_args(PassKind)
PLANNED_KINDS: Final = tuple(kind for kind in PASS_KINDS if kind != "U")
"""Kinds of passes that plans contain."""

CHUNKED_KINDS: Final[tuple[PassKind, ...]] = ("F", "R", "B", "W")
"""Kinds that belong to a model chunk; the vocabulary passes belong to the rank as a whole."""

PARTNERS: Final[Mapping[PassKind, tuple[PassKind, ...]]] = {
    "F": ("B", "W", "S", "T", "IB"),
    "B": ("W", "S", "T", "IB"),
}
"""The kinds of passes that may follow an F or a B in a pair. One of the two waits for collectives
of its layers, and the other one works meanwhile."""

BEGINNERS: Final[tuple[PassKind, ...]] = ("W", "F", "B", "S", "T", "IB")
"""Kinds of passes of a pair; the one that stands first here begins. With sequence parallelism a W
first gathers, and an F or a B hides that. S, T and IB wait for nobody."""

PAUSING: Final[tuple[PassKind, ...]] = ("F", "B")
"""Kinds of passes that pause between two products, if both passes of a pair do so."""

DESCENDING_KINDS: Final[tuple[PassKind, ...]] = ("R", "B", "W", "IB")
"""Kinds that take the slices of a microbatch from the last one to the first; others ascend."""

_TEXT: Final = re.compile(r"(IF|IB|F|R|B|W|S|E|T)(\d{1,18})(?:\.(\d{1,18}))?(?:/(\d{1,18}))?")


class OfSlice(Protocol):
    """A pass or a communication; both belong to a slice of a microbatch."""

    @property
    def microbatch(self) -> int:
        """Index of the microbatch."""

    @property
    def slice(self) -> int:
        """Index of the slice within the microbatch."""


class Pass(NamedTuple):
    """One unit of work.

    Attributes:
        kind: the kind of work.
        microbatch: index of the microbatch, counted from 0 within the iteration; for U the number
            of the bucket.
        chunk: index of the model chunk on the rank; 0 for the vocabulary passes.
        slice: index of the slice of the microbatch, in the order of the sequence; 0 if microbatches
            are whole.
    """

    kind: PassKind
    microbatch: int
    chunk: int = 0
    slice: int = 0

    def __str__(self) -> str:
        """Return the text form: ``F3``, ``F3.1`` for chunk 1, ``F3.1/2`` for its slice 2."""
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind}{self.microbatch}{chunk}" + (f"/{self.slice}" if self.slice else "")

    @classmethod
    def parse(cls, text: str) -> "Pass":
        """Read a text form.

        Raises:
            ValueError: if ``text`` is no pass.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"'{text[:40]}' is no pass: write a kind ({' '.join(PLANNED_KINDS)}), a microbatch "
                "and, for chunks after the first, a point and the chunk, for slices after the "
                "first, a slash and the slice, as in F3, B3.1 or F3.1/2"
            )
        kind, microbatch, chunk, slice_ = match.groups()
        if chunk is not None and kind not in CHUNKED_KINDS:
            raise ValueError(f"'{text}' names a chunk, but {kind} belongs to no model chunk")
        known = next(k for k in PLANNED_KINDS if k == kind)
        return cls(known, int(microbatch), int(chunk or 0), int(slice_ or 0))
