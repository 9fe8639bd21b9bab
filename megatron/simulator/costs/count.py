"""The work of a pass (computing, moving, sending, keeping) as plain data, from the code that runs.

``planning/count`` runs the real layers without values and lists the kernels and
communications that a GPU would get. This file only defines the types of that list, so a reader of a
list needs no torch. ``launch_time.py`` and ``collective_time.py`` compute the times of a list.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final, Literal, NamedTuple, TypeVar

from megatron.schedules.needs import CommKind
from megatron.schedules.passes import PassKind

CollectiveKind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "send",
    "shift",
    "all_to_all",
]
"""Kinds of communications; ``send`` is the message of one rank to another, in a ``shift`` every
rank sends one to the next rank of a ring, and in an ``all_to_all`` every rank sends each rank a
part of its own."""

CountedAxis = Literal[
    "tensor",
    "context",
    "context_heads",
    "context_ring",
    "column",
    "experts",
    "expert_tensor",
]
"""Axis of a collective. Row and tensor axis have the same ranks, so both count as ``tensor``;
``column`` is the pipeline, on which a vocabulary collective moves parts of an activation."""


class Product(NamedTuple):
    """Sizes of a matrix product [m, k] x [k, n], or of ``batch`` products of this size."""

    m: int
    n: int
    k: int
    batch: int = 1


Quickness = Literal[
    "16 bits", "8 bits", "8 bits by blocks", "8-bit weight gradients by blocks", "MXFP8"
]
"""Products that a GPU multiplies at rates of their own; a kernel declares which its product is
(``kernels/declared.py``)."""


class Launch(NamedTuple):
    """A kernel.

    Attributes:
        name: the name of PyTorch's operator.
        bytes: bytes that the kernel reads and writes, with each tensor counted once.
        flops: FLOPs of its products, counted as usual for model FLOPs: causal attention counts in
            full, although it needs only half; attention with a window counts only inside the
            window.
        product: sizes of the matrix product; ``None`` for other kernels, including attention.
        executed: FLOPs that the kernel really does: half of ``flops`` in causal attention.
        quickness: the rate of the product.
    """

    name: str
    bytes: int
    flops: int = 0
    product: Product | None = None
    executed: int = 0
    quickness: Quickness = "16 bits"


HALF: Final = 2
FULL: Final = 4
"""Bytes of an element: of activations and weights, and of gradients of weights and statistics."""


def product(m: int, n: int, k: int, *, bias: int = 0, written: int = HALF) -> Launch:
    """Return the launch of a product [m, k] x [k, n] in 16 bits.

    Args:
        m: rows.
        n: columns.
        k: depth.
        bias: elements of the bias that the kernel adds.
        written: bytes moved for each element of the result; if the kernel adds to a sum, both read
            and written.
    """
    size = HALF * (m * k + k * n + bias) + written * m * n
    return Launch("product", size, 2 * m * n * k, Product(m, n, k))


class Collective(NamedTuple):
    """A communication of several ranks.

    Attributes:
        kind: all-reduce, broadcast, ...
        axis: the ranks that take part.
        ranks: number of ranks that take part.
        bytes: bytes of the whole tensor: the result of an all-gather, the input of a
            reduce-scatter, or all parts that a rank sends in an all-to-all, its own included.
    """

    kind: CollectiveKind
    axis: CountedAxis
    ranks: int
    bytes: int


class Begin(NamedTuple):
    """Begin communications on the lane beside the passes, one after the other."""

    collectives: tuple[Collective, ...]


class Await(NamedTuple):
    """Wait for communications that were begun before.

    Attributes:
        later: how many of them, the last ones, the pass does not wait for yet.
    """

    later: int = 0


AWAIT: Final = Await()


class Pause(NamedTuple):
    """In a pair of passes that both pause, the other pass goes on here."""


PAUSE: Final = Pause()


class HostWait(NamedTuple):
    """The host waits until the device has done all work before, to read a number.

    Afterwards the device idles until the host has launched more. Nobody has measured how long with
    this project, so that a price of 0 stands for it.
    """


HOST_WAIT: Final = HostWait()

Step = Launch | Collective | Begin | Await | Pause | HostWait
"""A part of a pass. A ``Collective`` that stands alone is waited for at once."""


class InSlot(NamedTuple):
    """The part of a work that lies in a slot of captured passes, and is replayed.

    Attributes:
        slot: kind of the slot: of a "stage", of the "output" layer, or of the "input" layer.
        left: change of the bytes that the slot's graphs hold.
        peak: the most bytes that they hold meanwhile, less the bytes before.
        lasting: bytes of tensors outside of graphs that stay with the slot: inputs.
        launches: kernels that belong to graphs. The host launches the graphs instead.
        graphs: graphs that begin in this part.
    """

    slot: str
    left: int = 0
    peak: int = 0
    lasting: int = 0
    launches: int = 0
    graphs: int = 0

    def then(self, other: "InSlot") -> "InSlot":
        """Return the parts in order as one."""
        return InSlot(
            self.slot,
            self.left + other.left,
            max(self.peak, self.left + other.peak),
            self.lasting + other.lasting,
            self.launches + other.launches,
            self.graphs + other.graphs,
        )

    def repeated(self, times: int) -> "InSlot":
        """Return the part ``times`` times in a row."""
        peak = max(0, (times - 1) * self.left) + self.peak
        lasting, launches, graphs = (
            times * own for own in (self.lasting, self.launches, self.graphs)
        )
        return InSlot(self.slot, times * self.left, peak, lasting, launches, graphs)


def joined_in_slots(parts: Iterable[InSlot]) -> tuple[InSlot, ...]:
    """Return one part for each slot, from parts in order."""
    found: dict[str, InSlot] = {}
    for own in parts:
        found[own.slot] = found[own.slot].then(own) if own.slot in found else own
    return tuple(found.values())


@dataclass(frozen=True)
class Work:
    """The work of one pass, or of a part of a pass.

    Attributes:
        steps: kernels and communications, in order.
        left: change of the held bytes by the work; negative if the work frees memory.
        peak: the most bytes held during the work, less the bytes held before.
        moved: bytes that the work keeps for the backward and that may wait on the host; counted
            only for runs whose activations do.
        heights: bytes held after every tensor that the work makes, less the bytes held before.
            Counts of slices have them, because the peak of a slice is at other tensors than the
            peak of another slice.
        slots: the parts in slots; the bytes above do not include theirs.
        taken: bytes of every room that the work takes. A room is memory that the work of another
            unit takes again. No other bytes of the work include it.
        given: bytes of every room that the work gives back.
    """

    steps: tuple[Step, ...] = ()
    left: int = 0
    peak: int = 0
    moved: int = 0
    heights: tuple[int, ...] = ()
    slots: tuple[InSlot, ...] = ()
    taken: tuple[int, ...] = ()
    given: tuple[int, ...] = ()

    @property
    def launches(self) -> Iterator[Launch]:
        """Yield its kernels."""
        return (step for step in self.steps if isinstance(step, Launch))

    @property
    def flops(self) -> int:
        """FLOPs of its products, as in ``Launch.flops``."""
        return sum(launch.flops for launch in self.launches)

    def captured(self, slot: str) -> "Work":
        """Return the same work within a graph: all its bytes are those of a slot."""
        own = InSlot(slot, self.left, self.peak, launches=len([*self.launches]))
        return Work(self.steps, slots=(own,))


NO_WORK: Final = Work()


def in_order(*parts: Work) -> Work:
    """Return one work that consists of ``parts`` in order."""
    steps: list[Step] = []
    heights: list[int] = []
    taken: list[int] = []
    given: list[int] = []
    left = peak = moved = 0
    for part in parts:
        steps += part.steps
        taken += part.taken
        given += part.given
        heights += (left + height for height in part.heights)
        peak = max(peak, left + part.peak)
        left += part.left
        moved += part.moved
    slots = joined_in_slots(chain.from_iterable(part.slots for part in parts))
    rooms = tuple(taken), tuple(given)
    return Work(tuple(steps), left, peak, moved, tuple(heights), slots, *rooms)


class Matrix(NamedTuple):
    """A parameter that is a matrix: all on which the work of updating it as a whole depends.

    Attributes:
        name: the last words of its name, which are the same in all layers.
        own: rows and columns of the rank's part.
        whole: rows and columns of all parts that tensor-parallel ranks hold together.
        pieces: number of boxes of the rank's part, each cut from an equal part of ``whole``.
        stacked: number of equal matrices that lie one below the other in the parameter.
    """

    name: str
    own: tuple[int, int]
    whole: tuple[int, int]
    pieces: int = 1
    stacked: int = 1

    @property
    def elements(self) -> int:
        """Elements of the rank's part."""
        return self.own[0] * self.own[1]


NAME_WORDS: Final = 3
"""The last words of a parameter's name that tell its part of a layer: module, layer, tensor."""


def last_words(name: str) -> str:
    """Return the words of a parameter's name that are the same in all layers."""
    return ".".join(name.split(".")[-NAME_WORDS:])


@dataclass(frozen=True)
class Parameters:
    """Elements of a rank's parameters, in groups that an optimizer may treat differently.

    Attributes:
        matrices: elements in matrices of layers, and in learned positions.
        others: elements in embeddings of words, norms and biases.
        experts: elements in matrices of experts that are spread over ranks; other ranks have the
            same experts than have the same other parameters.
        sizes: name and elements of every parameter, but for the explorer's closed form. Equal
            layers may have the names of one of them.
        shapes: the parameters that some optimizers update as whole matrices, those of experts
            included, but for the explorer's closed form.
    """

    matrices: int = 0
    others: int = 0
    experts: int = 0
    sizes: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    shapes: tuple[Matrix, ...] = field(default=(), compare=False)

    @property
    def all(self) -> int:
        """All elements."""
        return self.matrices + self.others + self.experts

    def with_more(self, more: "Parameters", times: int = 1) -> "Parameters":
        """Return the sum of these elements and ``times`` the elements of ``more``."""
        return Parameters(
            self.matrices + times * more.matrices,
            self.others + times * more.others,
            self.experts + times * more.experts,
            self.sizes + times * more.sizes,
            self.shapes + times * more.shapes,
        )


@dataclass(frozen=True)
class Segment:
    """Layers of a stage that stand next to each other.

    Attributes:
        passes: F, R, B and W of the segment. If W is absent, B is the whole backward. The bytes of
            F do not include its input, and the bytes of B do not include the gradient that B
            receives: both exist before the pass. F does not free an input that the backward needs.
            The gradient that B hands to the layers before is freed by those layers.
        parameters: the parameters of the layers.
        held: bytes of the weights in 8 bits, and of sums over microbatches, which are made once in
            an iteration.
        once: the work that makes these weights.
        slices: the passes of every slice of a microbatch; empty: a microbatch is whole, or
            ``passes`` are those of one slice.
    """

    passes: Mapping[PassKind, Work] = field(default_factory=dict)
    parameters: Parameters = Parameters()
    held: int = 0
    once: Work = NO_WORK
    slices: "Sequence[Segment]" = ()

    def captured(self, slot: str) -> "Segment":
        """Return the same layers within graphs."""
        passes = {kind: own.captured(slot) for kind, own in self.passes.items()}
        return replace(self, passes=passes)

    def with_slices(self, slices: "Sequence[Segment]") -> "Segment":
        """Return the segment with the passes of other slices."""
        return replace(self, slices=tuple(slices))


@dataclass(frozen=True)
class PassCount:
    """The work of a rank's pass, or of a communication when it begins or ends.

    Attributes:
        parts: works in order, each with the number of times that the pass does it, because a stage
            repeats a layer. F and B of a stage have three parts: the work before its layers, the
            layers, and the work after them.
        left: change of the held bytes by the pass.
        peak: the most bytes held during the pass, less the bytes held before.
    """

    parts: tuple[tuple[Work, int], ...] = ()
    left: float = 0
    peak: float = 0

    @classmethod
    def of(cls, *works: Work) -> "PassCount":
        """Return a pass that does every work once."""
        return cls.joined([(work, 1) for work in works])

    @classmethod
    def joined(cls, parts: Sequence[tuple[Work, int]]) -> "PassCount":
        """Return a pass that does each work its number of times, in order."""
        left = peak = 0
        for work, times in parts:
            # When equal works follow one another, memory is fullest in the first or the last.
            peak = max(peak, left + max(0, (times - 1) * work.left) + work.peak)
            left += times * work.left
        return cls(tuple(parts), left, peak)

    @property
    def flops(self) -> int:
        """FLOPs of its products, as in ``Launch.flops``."""
        return sum(times * work.flops for work, times in self.parts)

    @property
    def moved(self) -> int:
        """Bytes that may wait on the host, as in ``Work.moved``."""
        return sum(times * work.moved for work, times in self.parts)

    @property
    def slots(self) -> tuple[InSlot, ...]:
        """Its parts in slots, one for each slot."""
        return joined_in_slots(
            own.repeated(times) for work, times in self.parts for own in work.slots
        )

    @property
    def kernels(self) -> int:
        """Number of its kernels."""
        return sum(times * len([*work.launches]) for work, times in self.parts)

    @property
    def launched(self) -> int:
        """How many times the host launches something: kernels without a graph, and graphs."""
        return self.kernels + sum(own.graphs - own.launches for own in self.slots)

    @property
    def taken(self) -> tuple[int, ...]:
        """Bytes of every room that it takes, as in ``Work.taken``."""
        return tuple(size for work, times in self.parts for size in times * work.taken)

    @property
    def given(self) -> tuple[int, ...]:
        """Bytes of every room that it gives back, as in ``Work.given``."""
        return tuple(size for work, times in self.parts for size in times * work.given)


NO_PASS: Final = PassCount()


@dataclass(frozen=True)
class RankCount:
    """The work of a pipeline rank for one microbatch, pass by pass.

    Attributes:
        passes: the passes, by kind and chunk.
        begun: communications that the rank issues, by kind and stage as in ``Comm``: the
            collectives, and the memory that they take.
        ended: the end of the same communications, after the rank has waited for them.
        parameters: the parameters of the rank.
        held: bytes that the rank always holds, beside parameters, gradients and optimizer state.
        once: additional work of the first F of an iteration, which makes the weights in 8 bits.
            The bytes of these weights are in ``held`` alone.
        slices: the count of every slice of the microbatch, without parameters and without bytes
            that are always held; empty: the microbatch is counted as a whole. The passes of the
            microbatch are then the sums of those of its slices.
    """

    passes: Mapping[tuple[PassKind, int], PassCount]
    begun: Mapping[tuple[CommKind, int], PassCount] = field(default_factory=dict)
    ended: Mapping[tuple[CommKind, int], PassCount] = field(default_factory=dict)
    parameters: Parameters = Parameters()
    held: int = 0
    once: PassCount = NO_PASS
    slices: "Sequence[RankCount]" = ()

    @classmethod
    def of_slices(cls, slices: "Sequence[RankCount]") -> "RankCount":
        """Return the count of a microbatch from the counts of its slices, in order."""
        return cls(
            _added([own.passes for own in slices]),
            _added([own.begun for own in slices]),
            _added([own.ended for own in slices]),
            slices=tuple(slices),
        )

    def with_slices(self, slices: "Sequence[RankCount]") -> "RankCount":
        """Return the count with the work of other slices."""
        return replace(
            self.of_slices(slices), parameters=self.parameters, held=self.held, once=self.once
        )

    def of_slice(self, number: int, slices: int) -> "tuple[RankCount, int]":
        """Return the count of a slice, and by how much to divide its numbers.

        A slice of a microbatch that was counted as a whole has an n-th of each number.
        """
        return (self.slices[number], 1) if self.slices else (self, slices)

    @property
    def rooms(self) -> int:
        """Bytes of all rooms that the passes of a microbatch take and give back."""
        return sum(sum(own.taken) for own in self.passes.values())

    @property
    def moved(self) -> Mapping[int, int]:
        """Bytes of every chunk that may wait on the host, if they are counted."""
        kinds = self.passes.items()
        return {chunk: own.moved for (kind, chunk), own in kinds if kind == "F" and own.moved}

    def with_segments(self, segments: Mapping[int, Sequence[tuple[Segment, int]]]) -> "RankCount":
        """Return the count of a rank whose chunks have further layers before their own.

        Args:
            segments: for every chunk, its segments in the order of the data, each with the number
                of times that it is repeated.
        """
        slices = [
            own._with_layers(
                {
                    chunk: [(one.slices[number], times) for one, times in parts]
                    for chunk, parts in segments.items()
                }
            )
            for number, own in enumerate(self.slices)
        ]
        longer = self.of_slices(slices) if slices else self._with_layers(segments)
        held, parameters, once = self.held, self.parameters, [*self.once.parts]
        for one, times in chain.from_iterable(segments.values()):
            held += times * one.held
            parameters = parameters.with_more(one.parameters, times)
            once.append((one.once, times))
        return replace(
            self,
            passes=longer.passes,
            parameters=parameters,
            held=held,
            once=PassCount.joined(once),
            slices=longer.slices,
        )

    def _with_layers(self, segments: Mapping[int, Sequence[tuple[Segment, int]]]) -> "RankCount":
        """Return the count with longer passes."""
        passes = {
            (kind, chunk): _longer(kind, own, segments.get(chunk, ()))
            for (kind, chunk), own in self.passes.items()
        }
        return replace(self, passes=passes)


_Key = TypeVar("_Key", tuple[PassKind, int], tuple[CommKind, int])


def _added(counts: Sequence[Mapping[_Key, PassCount]]) -> Mapping[_Key, PassCount]:
    """Return the counts of the same passes or communications of several slices as one."""
    return {
        key: PassCount.joined([part for own in counts if key in own for part in own[key].parts])
        for key in {key: None for own in counts for key in own}
    }


_FRONT_TO_BACK: Final = ("F", "R")
"""Passes that go through a stage in the order of the data; B and W go the other way."""

_BEFORE_FURTHER: Final[Mapping[PassKind, int]] = {"F": 1, "R": 0, "B": 2, "W": 1}
"""Number of parts of a stage's pass that come before the parts of further layers."""


def _longer(kind: PassKind, own: PassCount, segments: Sequence[tuple[Segment, int]]) -> PassCount:
    """Return the pass of a stage with further layers before the layers of ``own``."""
    works = [(segment.passes[kind], times) for segment, times in segments if kind in segment.passes]
    if not works:
        return own
    if kind not in _FRONT_TO_BACK:
        works.reverse()
    place = _BEFORE_FURTHER[kind]
    return PassCount.joined([*own.parts[:place], *works, *own.parts[place:]])
