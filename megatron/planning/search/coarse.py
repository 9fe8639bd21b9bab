"""Seconds and bytes of all combinations of choices, from a few counts, before any plan is made.

A layer's work and memory follow from the shape of a run: its tensor, context and expert ranks. So
every shape is counted once, with one stage, and stages divide work and memory. Choices that change
a layer by a factor, such as recomputation, are counted once each. The result ranks combinations;
plans of some of them correct the rank of the others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, product, takewhile
from typing import Final

from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.settings import PipelineRankSettings
from megatron.planning.known import Known
from megatron.planning.processes import AHEAD
from megatron.planning.search.dimensions import ASKING_FOR_SCHEDULES, taking
from megatron.planning.search.rough import Combination, Factor, Rough, Shape
from megatron.planning.search.runs import Promise, Runs, promise_of
from megatron.run.dimension import Dimension
from megatron.run.edit import Choice, left_out, set_to
from megatron.run.line import Line, combined
from megatron.run.pairs import pairs_of
from megatron.run.schedule import ASKING_FOR_TREATMENTS
from megatron.run.train import batch_share
from megatron.schedules.catalogue import OF_EVERY_SHAPE
from megatron.schedules.search.watch import Watch

_PIPELINE: Final = "--pipeline-model-parallel-size"
_MICRO_BATCH: Final = "--micro-batch-size"
_BATCH: Final = "--global-batch-size"
_BATCHES: Final = 4
"""Microbatches of a job that is counted for its shape."""
_ALIKE: Final = 0.02
"""Choices whose memory differs by less than this share are compared by their time alone."""


@dataclass
class Coarse:
    """The rough figures of the combinations of a line's open dimensions.

    Attributes:
        line: the line.
        dimensions: those that it leaves open; after a count there may be more choices in them.
        runs: counts the shapes.
        refused: why shapes make no run.
        watch: ends the counts early; a choice that is not counted is not looked at.
    """

    line: Line
    dimensions: Sequence[Dimension]
    runs: Runs
    refused: dict[str, None]
    watch: Watch = field(default_factory=Watch)
    _shapes: dict[Combination, tuple[Line, Shape]] = field(default_factory=dict)
    _placed: list[Line] = field(default_factory=list)
    """Lines of all shapes with all stages."""
    _factors: dict[tuple[str, Choice], Factor] = field(default_factory=dict)
    _ordered: dict[Combination, list[Factor]] = field(default_factory=dict)
    _held: dict[tuple[object, ...], Promise] = field(default_factory=dict)
    _allowed: dict[tuple[object, ...], bool] = field(default_factory=dict)
    _able: dict[tuple[object, ...], frozenset[Choice]] = field(default_factory=dict)
    _shared: float | None = None
    """Bytes of states of ``Shape``: all ranks of the job share all states, whatever the shape."""

    def count(self, near: Iterable[Combination] | None = None) -> None:
        """Count shapes that are not counted yet, and factors for which half of the time suffices.

        Args:
            near: combinations; of shapes with other choices in later dimensions, those are counted
                that share the choices in all dimensions before with one of these. ``None``: all.
        """
        early = len(list(takewhile(lambda own: not own.later, self._of("shape"))))
        alike = None if near is None else {self._shape_of(own)[:early] for own in near}
        counting = self.watch.part(self.watch.left / 2)
        counted = {
            choices: line
            for line in combined(self.line, self._of("shape"))
            if (choices := self._choices_of(line)) not in self._shapes
            and (alike is None or choices[:early] in alike)
        }
        self._expect(counted.values())
        for choices, line in counted.items():
            if (shape := self._counted(line)) is not None:
                self._shapes[choices] = line, shape
        lines = [line for line, _ in self._shapes.values()]
        self._placed = [one for line in lines for one in combined(line, self._of("pipeline"))]
        self._ordered.clear()
        factors = self._uncounted()
        self._expect(line.edited(own) for one, line in factors for own in one.choices(line.flags))
        for dimension, line in factors:
            self._count_factor(dimension, line, counting)

    def _uncounted(self) -> list[tuple[Dimension, Line]]:
        """Return the factors that are not counted yet, each with the line that it multiplies."""
        counted, found = {name for name, _ in self._factors}, list[tuple[Dimension, Line]]()
        for dimension in self.dimensions:
            if dimension.name not in counted and (dimension.kind == "factor" or dimension.counted):
                numbers = [len(dimension.choices(one.flags)) for one in self._placed]
                most = max(numbers, default=1)
                able = [one for one, own in zip(self._placed, numbers, strict=True) if own == most]
                if most > 1:
                    line = _typical(able) if dimension.later else _middle(able)
                    found.append((dimension, line))
        return found

    def has(self, combination: Combination) -> bool:
        """Return whether the dimensions have all choices of a combination."""
        if self._shape_of(combination) not in self._shapes:
            return False
        placed, chosen = self._split(combination)
        return all(
            chosen[own.name] in own.choices(placed.flags) for own in self.dimensions if own.later
        )

    def first(self) -> list[Rough]:
        """Return all layouts with the schedules and treatments that stand for the others."""
        found = list[Rough]()
        for placed in self._placed:
            ways = [self._useful(own, placed) for own in self._of("factor")]
            found += self._rough(placed, ways, self._standing_in(placed))
        return found

    def around(self, best: Combination) -> list[Rough]:
        """Return the combinations with another order of passes than ``best``, or another factor."""
        placed, chosen = self._split(best)
        same = [[chosen[own.name]] for own in self._of("factor")]
        found = self._rough(placed, same, list(product(*self._choices("order", placed))))
        order = [tuple(chosen[own.name] for own in self._of("order"))]
        for index, own in enumerate(self._of("factor")):
            ways = [*same[:index], list(own.choices(placed.flags)), *same[index + 1 :]]
            found += self._rough(placed, ways, order)
        return found

    def shifted(self, best: Combination) -> list[Rough]:
        """Return the combinations that differ from ``best`` in one later dimension of the shape."""
        placed, chosen = self._split(best)
        order = tuple(chosen[own.name] for own in self._of("order"))
        same = [[chosen[own.name]] for own in self._of("factor")]
        found = list[Rough]()
        for dimension in self._of("shape"):
            for choice in dimension.choices(placed.flags) if dimension.later else ():
                changed = {**chosen, dimension.name: choice}
                layout = (*self._of("shape"), *self._of("pipeline"))
                line = self.line.edited(tuple(one for own in layout for one in changed[own.name]))
                if choice != chosen[dimension.name] and self._choices_of(line) in self._shapes:
                    found += self._rough(line, same, [order])
        return found

    def treated(self, best: Combination) -> list[Rough]:
        """Return the combinations that differ from ``best`` in the last dimension only."""
        placed, chosen = self._split(best)
        same = [[chosen[own.name]] for own in self._of("factor")]
        *others, last = self._of("order")
        before = tuple(chosen[own.name] for own in others)
        return self._rough(placed, same, [(*before, own) for own in last.choices(placed.flags)])

    def _split(self, best: Combination) -> tuple[Line, dict[str, Choice]]:
        """Return the line with the ranks of ``best``, and the choices of ``best`` by dimension."""
        line, _ = self._shapes[self._shape_of(best)]
        chosen = dict(zip((own.name for own in self.dimensions), best, strict=True))
        placed = line.edited(
            tuple(edit for own in self._of("pipeline") for edit in chosen[own.name])
        )
        return placed, chosen

    def _shape_of(self, combination: Combination) -> Combination:
        """Return the choices of a combination in the dimensions of its shape."""
        both = zip(self.dimensions, combination, strict=True)
        return tuple(choice for own, choice in both if own.kind == "shape")

    def _of(self, kind: str) -> list[Dimension]:
        return [own for own in self.dimensions if own.kind == kind]

    def _choices(self, kind: str, line: Line) -> list[Sequence[Choice]]:
        """Return all choices of every dimension of a kind."""
        return [own.choices(line.flags) for own in self._of(kind)]

    def _standing_in(self, placed: Line) -> list[Combination]:
        """Return the orders of passes that stand for all others on a line's stages.

        Of every dimension they have the first choices that no rule refuses beside the choices of
        the dimensions before it.
        """
        found: list[Combination] = [()]
        for own in self._of("order"):
            choices, longer = own.choices(placed.flags), list[Combination]()
            for before in found:
                able = (one for one in choices if self._is_allowed(placed, *before, one))
                first = list(islice(able, own.stand_ins)) or choices[: own.stand_ins]
                longer += [(*before, one) for one in first]
            found = longer
        return found

    def _is_allowed(self, placed: Line, *order: Choice) -> bool:
        """Return whether the rules allow an order of passes on a line's stages."""
        key = placed.given[_PIPELINE], order
        if key not in self._allowed:
            edits = tuple(edit for choice in order for edit in choice)
            self._allowed[key] = not _with_micro_batch(placed).edited(edits).fault
        return self._allowed[key]

    def _choices_of(self, line: Line) -> Combination:
        """Return the choices of a line in the dimensions of its shape."""
        return tuple(
            tuple(edit for edit in line.edits if edit.option in own.options)
            for own in self._of("shape")
        )

    def _small(self, line: Line, stages: int) -> Line:
        """Return a job with the shape of a line, few microbatches and a whole vocabulary."""
        one = _with_micro_batch(line).edited(
            (
                *map(left_out, (*ASKING_FOR_SCHEDULES, *ASKING_FOR_TREATMENTS)),
                set_to(_PIPELINE, stages),
                *taking(OF_EVERY_SHAPE[0]),
                set_to("--layer-distribution", "remainder"),
            )
        )
        return one.edited((set_to(_BATCH, _BATCHES * batch_share(one.flags).at_once),))

    def _expect(self, lines: Iterable[Line]) -> None:
        """Let other processes count lines that are about to be counted."""
        if self.runs.helpers:
            self.runs.expect("bound", self._smalls(lines), AHEAD)

    def _smalls(self, lines: Iterable[Line]) -> Iterator[Line]:
        for line in lines:
            with suppress(ValueError):  # told where the line is counted
                yield self._small(line, 1)

    def _bounds(self, line: Line, stages: int) -> Known | None:
        try:
            return self.runs.bound(self._small(line, stages))
        except ValueError as error:
            self.refused.setdefault(str(error).split("\n")[0])
            return None

    def _counted(self, line: Line) -> Shape | None:
        """Count a shape; ``None`` if it makes no run."""
        one = self._bounds(line, 1)
        if one is None:
            return None
        if self._shared is None:
            self._shared = self.runs.candidate(self._small(line, 1)).shared_states
        shared = min(self._shared, one.held.static)
        return Shape(
            one.seconds / (_BATCHES * _samples(line)),
            one.held.static - shared,
            shared,
            one.held.peak - one.held.static,
            one.held.room(self.runs.gpu),
        )

    def _count_factor(self, dimension: Dimension, line: Line, counting: Watch) -> None:
        """Count what each choice makes of a shape, relative to the dimension's plain choice."""
        base = self._bounds(line, 1)
        for choice in dimension.choices(line.flags):
            own = None if counting.is_over else self._bounds(line.edited(choice), 1)
            if base is not None and own is not None:
                samples = _samples(line.edited(choice)) / _samples(line)
                self._factors[dimension.name, choice] = Factor(
                    own.seconds / base.seconds / samples,
                    own.held.static / base.held.static,
                    (own.held.peak - own.held.static) / (base.held.peak - base.held.static),
                )

    def _useful(self, dimension: Dimension, line: Line) -> list[Choice]:
        """Return the choices of a factor of which none is slower than one that holds as little."""
        found = list[Choice]()
        choices = list(dimension.choices(line.flags))
        if len(choices) > 1:
            counted = [one for one in choices if (dimension.name, one) in self._factors]
            choices = counted or choices[:1]
        known = {one: self._factors.get((dimension.name, one), Factor()) for one in choices}
        for choice in sorted(choices, key=lambda one: known[one].seconds):
            less = known[choice]
            if all(
                less.static * (1 + _ALIKE) < known[own].static
                or less.kept * (1 + _ALIKE) < known[own].kept
                for own in found
            ):
                found.append(choice)
        return found

    def _rough(
        self,
        placed: Line,
        ways: Sequence[Sequence[Choice]],
        orders: Sequence[Combination],
    ) -> list[Rough]:
        """Return the combinations of a line whose ranks are placed.

        Args:
            placed: the line with its shape and its stages.
            ways: the choices of every factor.
            orders: orders of passes, each a choice for every dimension that changes the order.
        """
        found = list[Rough]()
        _, shape = self._shapes[self._choices_of(placed)]
        stages = placed.flags[PipelineRankSettings].size
        names = [own.name for own in self._of("factor")]
        for chosen in product(*ways):
            edits = tuple(edit for own in chosen for edit in own)
            line = placed.edited(edits)
            micro, (_, batches, rest) = _samples(line), batch_share(line.flags)
            if rest or not batches:
                continue
            factors = self._factors_of(names, chosen)
            combination = self._combinations(placed, chosen)
            for order in self._beside(placed, edits, orders):
                known = [*factors, *self._factors_of_order(order)]
                promise = self._promised(placed, order, stages, batches, micro)
                seconds = micro * _product(known).seconds * shape.seconds / stages
                found.append(
                    Rough(
                        combination(order),
                        (stages, *order),
                        seconds * (batches + promise.bubble),
                        *self._bytes(shape, known, stages, promise, batches),
                    )
                )
        return found

    def _bytes(
        self,
        shape: Shape,
        known: Sequence[Factor],
        stages: int,
        promise: Promise,
        microbatches: int,
    ) -> tuple[float, float]:
        """Return the bytes of the fullest rank, and the bytes that its tensors may take.

        Args:
            shape: the shape.
            known: the factors by which choices change it.
            stages: pipeline ranks.
            promise: of the order of passes. Under a limit by memory that the plan may fill, a rank
                holds as many microbatches as the limit has room for, if there are so many.
            microbatches: of an iteration.
        """
        own, in_full = _product(known), _product(known, in_full=True)
        kept, all_kept = own.kept * shape.kept / stages, in_full.kept * shape.kept / stages
        of_one = kept + promise.waiting * (all_kept - kept)
        static = own.static * (shape.whole / stages + shape.shared)
        peak = static + promise.held * of_one
        if promise.limit is None:
            return peak, shape.room
        room = min(shape.room, promise.limit.bytes(self.runs.gpu.memory))
        return max(peak, min(static + microbatches * of_one, room)), room

    def _beside(
        self, placed: Line, edits: Choice, orders: Sequence[Combination]
    ) -> Sequence[Combination]:
        """Return the orders of which every choice goes with the edits of factors."""
        for at, own in enumerate(self._of("order")):
            deciding = tuple(edit for edit in edits if edit.option in own.beside)
            if deciding:
                key = own.name, placed.edits, deciding
                if key not in self._able:
                    self._able[key] = frozenset(own.choices(placed.edited(deciding).flags))
                orders = [each for each in orders if each[at] in self._able[key]]
        return orders

    def _factors_of(self, names: Sequence[str], chosen: Combination) -> list[Factor]:
        """Return the counted factors of a choice for each of some dimensions."""
        named = zip(names, chosen, strict=True)
        return [self._factors[key] for key in named if key in self._factors]

    def _factors_of_order(self, order: Combination) -> list[Factor]:
        if order not in self._ordered:
            names = [own.name for own in self._of("order")]
            self._ordered[order] = self._factors_of(names, order)
        return self._ordered[order]

    def _combinations(
        self, placed: Line, chosen: Combination
    ) -> Callable[[Combination], Combination]:
        """Return what makes the choices of all dimensions of the choices of an order."""
        factors = iter(chosen)
        whole = [
            next(factors)
            if own.kind == "factor"
            else tuple(edit for edit in placed.edits if edit.option in own.options)
            for own in self.dimensions
        ]
        places = [at for at, own in enumerate(self.dimensions) if own.kind == "order"]

        def combination(order: Combination) -> Combination:
            for at, choice in zip(places, order, strict=True):
                whole[at] = choice
            return tuple(whole)

        return combination

    def _promised(
        self, line: Line, order: Combination, stages: int, batches: int, micro: int
    ) -> Promise:
        key = (order, stages, batches, pairs_of(line.flags).joins)
        if key not in self._held:
            chosen = line.edited(tuple(edit for choice in order for edit in choice))
            self._held[key] = promise_of(chosen.edited((set_to(_MICRO_BATCH, micro),)))
        return self._held[key]


def _product(factors: Sequence[Factor], *, in_full: bool = False) -> Factor:
    """Return the product of some factors.

    Args:
        factors: the factors.
        in_full: whether no choice keeps less than the plain choice of its dimension.
    """
    seconds = static = kept = 1.0
    for own in factors:
        seconds, static = seconds * own.seconds, static * own.static
        kept *= max(own.kept, 1.0) if in_full else own.kept
    return Factor(seconds, static, kept)


def _middle(lines: Sequence[Line]) -> Line:
    return lines[len(lines) // 2]


def _typical(lines: Sequence[Line]) -> Line:
    """Return a line of few context ranks: of many, passes are short, and factors much larger."""
    sizes = [line.flags[ContextRankSettings].size for line in lines]
    return _middle([line for line, own in zip(lines, sizes, strict=True) if own == min(sizes)])


def _with_micro_batch(line: Line) -> Line:
    """Return a line with a micro batch, the smallest if it has none."""
    return line if _MICRO_BATCH in line.given else line.edited((set_to(_MICRO_BATCH, 1),))


def _samples(line: Line) -> int:
    """Return the samples of a line's microbatch."""
    return int(line.given.get(_MICRO_BATCH, ("1",))[0])
