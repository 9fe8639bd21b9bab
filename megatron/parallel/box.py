"""Boxes: which part of a global tensor a rank holds. Plain arithmetic.

Every tensor of the model has a global shape, as if one rank held the whole model without padding. A
box is a range of its indices in every dimension. A rank holds *pieces* of a tensor: boxes, each
with its place in the tensor that the rank has in memory. All code that must know which rank holds
which elements works with boxes, and does not know how the model was cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A range of indices in every dimension of a tensor; it may be empty.

    Attributes:
        start: first index in every dimension.
        shape: number of indices in every dimension.
    """

    start: Shape
    shape: Shape

    def __post_init__(self) -> None:
        assert len(self.start) == len(self.shape), f"{self.start} and {self.shape} differ in length"
        assert min((*self.start, *self.shape), default=0) >= 0, f"{self} has negative numbers"

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Return the box that is all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> Shape:
        """The index after the last in every dimension."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts the box out of the whole tensor."""
        return tuple(map(slice, self.start, self.stop))

    def __and__(self, other: "Box") -> "Box":
        """Return the common part of two boxes of the same tensor, maybe an empty box."""
        start = tuple(map(max, self.start, other.start))
        stop = map(min, self.stop, other.stop)
        return Box(start, tuple(max(0, b - a) for a, b in zip(start, stop, strict=True)))

    def moved(self, offset: Sequence[int]) -> "Box":
        """Return the box with ``offset`` added to its indices."""
        return Box(tuple(a + by for a, by in zip(self.start, offset, strict=True)), self.shape)

    def within(self, outer: "Box") -> "Box":
        """Return this box in the indices of a tensor that holds only ``outer``, a box around it."""
        assert self & outer == self or self.size == 0, f"{self} is not in {outer}"
        return self.moved([-a for a in outer.start])

    def rows(self, first: int, last: int) -> "Box":
        """Return the rows ``first`` to ``last`` - 1 of the box, counted from its own first row."""
        assert 0 <= first <= last <= self.shape[0], f"no rows {first} to {last} in {self}"
        return Box((self.start[0] + first, *self.start[1:]), (last - first, *self.shape[1:]))


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor, and where it lies in a rank's own tensor.

    Attributes:
        box: the part of the global tensor.
        at: index of the box's first element in the rank's tensor, in every dimension.
    """

    box: Box
    at: Shape

    @property
    def local(self) -> Box:
        """The box of the piece in the rank's own tensor."""
        return Box(self.at, self.box.shape)


def whole(shape: Sequence[int]) -> tuple[Piece, ...]:
    """Return the pieces of a rank that holds all of a tensor of this shape."""
    box = Box.whole(shape)
    return (Piece(box, box.start),)


def shard(
    shape: Sequence[int], dimension: int, index: int, shards: int, fused: int = 1
) -> tuple[Piece, ...]:
    """Return the pieces of one of several equal shards of a tensor.

    Args:
        shape: shape of the global tensor.
        dimension: dimension that is cut.
        index: index of the shard.
        shards: number of shards.
        fused: number of equal tensors that lie one after the other in ``dimension``. Each is cut by
            itself; 2 for SwiGLU's gate and up projection.
    """
    length, rest = divmod(shape[dimension], shards * fused)
    assert rest == 0, f"{shape} does not split into {shards} shards of {fused} in {dimension}"
    box = Box.whole(shape)

    def cut(start: int) -> Shape:
        return (*box.start[:dimension], start, *box.start[dimension + 1 :])

    own = (*shape[:dimension], length, *shape[dimension + 1 :])
    return tuple(
        Piece(Box(cut((part * shards + index) * length), own), cut(part * length))
        for part in range(fused)
    )


def overlaps(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Yield every two boxes of one tensor that have elements in common."""
    ordered = sorted((box for box in boxes if box.size), key=lambda box: box.start)
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if other.start[:1] >= box.stop[:1] and box.start:
                break  # from here on all begin in later rows
            if (box & other).size:
                yield box, other


def check_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Check that boxes cover every element of a tensor exactly once.

    Args:
        shape: shape of the tensor.
        boxes: in any order; empty boxes are allowed.

    Raises:
        ValueError: an element is missing, covered twice or outside; the message names the boxes.
    """
    all_of_it = Box.whole(shape)
    for box in boxes:
        if box.size and box & all_of_it != box:
            raise ValueError(f"{box} is not inside a tensor of shape {tuple(shape)}")
    for box, other in overlaps(boxes):
        raise ValueError(f"{box} and {other} overlap in a tensor of shape {tuple(shape)}")
    covered = sum(box.size for box in boxes)
    if covered != all_of_it.size:
        raise ValueError(
            f"{covered} of {all_of_it.size} elements of a tensor of shape {tuple(shape)} are "
            f"covered, by {list(boxes)}"
        )
