"""A plan is the result of a schedule: for every rank, its passes in the order of execution.

A plan holds no times and no communication: ``needs`` derives the dependencies, ``lower`` adds the
communication, and the simulator computes the times.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from megatron.schedules.passes import PARTNERS, OfSlice, Pass, PassKind
from megatron.schedules.treatments import TREATMENTS, Treatment


@dataclass(frozen=True)
class Plan:
    """The passes of every rank, in order.

    Attributes:
        rows: for each rank its passes in the order of execution.
        stages: (rank, chunk) of every stage, in the order in which the data flows.
        microbatches: microbatches m of one iteration.
        treatment: how the vocabulary layers are run; ``none`` for ``redis`` too. If it is
            synchronous, S and T of a microbatch stand next to each other. Even then, a rank waits
            for the collectives of the input layer only where a pass needs them.
        forward_only: the plan is for evaluation and has no B, W and IB.
        ahead_stage: the stage that also reads embeddings, of the tokens that follow, and predicts
            further tokens from them (multi-token prediction). Messages of the stages after it have
            its predictions. If the vocabulary is split, CIF and CIB serve the first stage and this
            one. ``None``: no stage looks ahead.
        pairs: the rank and the first pass of every pair, an F or a B. It is joined with the pass
            that follows it in the row: a rank runs both together, so that one pass computes while
            the other waits for a collective (``schedules.pairs``).
        slices: slices n into which every microbatch is cut along its sequence. A slice of a
            microbatch is a *unit*: every pass and every communication is of one unit.
        offloaded: number of chunks of every rank whose activations wait on the host between F and
            backward (``schedules.offload``).
    """

    rows: tuple[tuple[Pass, ...], ...]
    stages: tuple[tuple[int, int], ...]
    microbatches: int
    treatment: Treatment = TREATMENTS["none"]
    forward_only: bool = False
    ahead_stage: int | None = None
    pairs: frozenset[tuple[int, Pass]] = frozenset()
    slices: int = 1
    offloaded: int = 0

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks p."""
        return len(self.rows)

    @property
    def units(self) -> int:
        """Number of units, the slices of all microbatches."""
        return self.microbatches * self.slices

    def unit(self, item: OfSlice) -> int:
        """Return the number of the unit of a pass or a communication, in the order of the data."""
        return item.microbatch * self.slices + item.slice

    @cached_property
    def chunks(self) -> int:
        """Model chunks per rank v."""
        return 1 + max(chunk for _, chunk in self.stages)

    @cached_property
    def stage_of(self) -> dict[tuple[int, int], int]:
        """Stage number of every (rank, chunk)."""
        return {place: stage for stage, place in enumerate(self.stages)}

    @cached_property
    def readers(self) -> tuple[tuple[int, int], ...]:
        """Return (rank, chunk) of every stage that reads embeddings, each once."""
        ahead = () if self.ahead_stage is None else (self.stages[self.ahead_stage],)
        return tuple(dict.fromkeys((self.stages[0], *ahead)))

    def hands_on_predictions(self, stage: int) -> bool:
        """Whether the output of a stage has the predictions of further tokens too."""
        return self.ahead_stage is not None and stage >= self.ahead_stage

    @cached_property
    def split_backward(self) -> bool:
        """Whether the weight gradients are separate passes (W)."""
        return any(p.kind == "W" for p in self.rows[0])

    @cached_property
    def recomputes(self) -> bool:
        """Whether layers are computed again in passes of their own (R), not in B."""
        return any(p.kind == "R" for p in self.rows[0])

    def steps(self, rank: int) -> Iterator[tuple[Pass, ...]]:
        """Yield the row of a rank in steps: a pass by itself, or the two passes of a pair."""
        row = iter(self.rows[rank])
        for item in row:
            yield (item, next(row)) if (rank, item) in self.pairs else (item,)

    def row_text(self, rank: int) -> str:
        """Return the text form of a row: ``F5|B2`` and ``B5|W2`` are pairs."""
        return " ".join("|".join(map(str, step)) for step in self.steps(rank))

    def to_text(self) -> str:
        """Return the text form: a header and one row of passes per rank."""
        header = [
            f"microbatches {self.microbatches}",
            "stages " + " ".join(f"{rank}.{chunk}" for rank, chunk in self.stages),
            f"vocabulary {self.treatment.name}",
        ]
        if self.slices > 1:
            header.append(f"slices {self.slices}")
        if self.forward_only:
            header.append("forward only")
        if self.ahead_stage is not None:
            is_last = self.ahead_stage == len(self.stages) - 1
            header.append("looks ahead" if is_last else f"looks ahead {self.ahead_stage}")
        if self.offloaded:
            header.append(f"offloaded {self.offloaded}")
        rows = (f"{rank}: {self.row_text(rank)}" for rank in range(self.ranks))
        return "\n".join([*header, *rows]) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Plan":
        """Read a plan from its text form; ``#`` starts a comment. ``check`` is not called.

        Without a line ``slices N`` microbatches are whole. ``looks ahead`` without the number of a
        stage means the last stage.
        Older files have the lines ``barriers N`` and ``collectives synchronous`` instead of
        ``vocabulary NAME``.

        Raises:
            ValueError: if a line is missing or cannot be read; the message names the line.
        """
        header: dict[str, str] = {}
        rows: list[tuple[Pass, ...]] = []
        pairs: set[tuple[int, Pass]] = set()
        known: dict[str, tuple[Pass, ...]] = {}
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.split("#")[0].strip()
            try:
                name, _, value = line.partition(" ")
                if name.endswith(":"):
                    steps = _steps(name, value, len(rows), known)
                    pairs.update((len(rows), step[0]) for step in steps if len(step) > 1)
                    rows.append(tuple(item for step in steps for item in step))
                elif line:
                    _add_header(header, name, value.strip())
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
        _name_treatment(header)
        missing = [name for name in _EXAMPLES if name not in header]
        if missing:
            lines = ", ".join(f"'{name} {_EXAMPLES[name]}'" for name in missing)
            raise ValueError(f"a plan begins with its {', '.join(missing)}: add lines like {lines}")
        return cls(
            rows=tuple(rows),
            stages=(stages := _stages(header["stages"])),
            microbatches=int(header["microbatches"]),
            treatment=TREATMENTS[header["vocabulary"]],
            forward_only="forward" in header,
            ahead_stage=_ahead_stage(header.get("looks"), len(stages)),
            pairs=frozenset(pairs),
            slices=int(header.get("slices", 1)),
            offloaded=int(header.get("offloaded", "0")),
        )


_NAMES: Final = tuple(name for name, own in TREATMENTS.items() if own.in_plan == own)
_EXAMPLES: Final = {"microbatches": "4", "stages": "0.0 1.0", "vocabulary": "vocab-2"}
"""Header lines that every plan has; the example is a plan of two ranks with one chunk each."""

_HEADER: Final = {
    "microbatches": re.compile(r"\d{1,18}"),
    "stages": re.compile(r"\d{1,18}\.\d{1,18}( +\d{1,18}\.\d{1,18})*"),
    "vocabulary": re.compile("|".join(_NAMES)),
    "slices": re.compile(r"\d{1,18}"),
    "forward": re.compile("only"),
    "looks": re.compile(r"ahead( +\d{1,18})?"),
    "offloaded": re.compile(r"\d{1,18}"),
}
_OLD_HEADER: Final = {
    "barriers": re.compile(r"none|\d+"),
    "collectives": re.compile("synchronous"),
}
_OLD_NAMES: Final = {
    "barriers none": "none",
    "barriers 1": "vocab-2",
    "barriers 2": "vocab-1",
    "barriers 2, collectives synchronous": "interlaced",
    "barriers 3": "naive",
}
"""Header lines of older files -> name of the treatment that they describe."""


def _add_header(header: dict[str, str], name: str, value: str) -> None:
    known = _HEADER | _OLD_HEADER
    if name not in known:
        raise ValueError(f"'{name[:40]}' is no header line: write one of {', '.join(_HEADER)}")
    if name in header:
        raise ValueError(f"'{name}' stands there twice")
    if not known[name].fullmatch(value):
        raise ValueError(
            f"'{name} {value[:40]}' cannot be read: write 'microbatches M', "
            f"'stages RANK.CHUNK ...', 'vocabulary NAME' with one of {', '.join(_NAMES)}, 'slices "
            "N', 'forward only', 'looks ahead', 'looks ahead STAGE', or 'offloaded CHUNKS'"
        )
    header[name] = value


def _name_treatment(header: dict[str, str]) -> None:
    """Add the ``vocabulary`` line to the header of an older file, made from its older lines."""
    old = ", ".join(f"{name} {header[name]}" for name in _OLD_HEADER if name in header)
    if not old:
        return
    if "vocabulary" in header:
        raise ValueError(
            f"'{old}' says again what 'vocabulary {header['vocabulary']}' says: leave it out"
        )
    if old not in _OLD_NAMES:
        raise ValueError(
            f"'{old}' is no treatment of the vocabulary: write 'vocabulary NAME' instead, with one "
            f"of {', '.join(_NAMES)}"
        )
    header["vocabulary"] = _OLD_NAMES[old]


def _stages(text: str) -> tuple[tuple[int, int], ...]:
    places = (word.partition(".") for word in text.split())
    return tuple((int(rank), int(chunk)) for rank, _, chunk in places)


def _ahead_stage(text: str | None, stages: int) -> int | None:
    if text is None:
        return None
    _, _, stage = text.partition(" ")
    return int(stage) if stage else stages - 1


def _steps(
    name: str, value: str, rank: int, known: dict[str, tuple[Pass, ...]]
) -> list[tuple[Pass, ...]]:
    """Return the steps of a row; ``known`` has all steps read so far, which rows share."""
    if name != f"{rank}:":
        raise ValueError(f"expected the row of rank {rank}, got '{name[:40]}'")
    words = value.split()
    for word in words:
        if word not in known:
            known[word] = _step(word)
    return list(map(known.__getitem__, words))


def _step(word: str) -> tuple[Pass, ...]:
    """Return the pass that a word is, or the two passes of a pair."""
    step = tuple(map(Pass.parse, word.split("|")))
    if len(step) > 2 or (len(step) == 2 and step[1].kind not in PARTNERS.get(step[0].kind, ())):
        ways = ", or ".join(f"{kind} with {' '.join(own)}" for kind, own in PARTNERS.items())
        raise ValueError(f"'{word[:40]}' is no pair: join {ways}, in this order, as in F5|B2")
    return step


def passes_of(plan: Plan, rank: int) -> tuple[Pass, ...]:
    """Return the passes of microbatch 0 on ``rank``, of all its slices.

    Other microbatches have the same passes.
    """
    kinds: list[PassKind] = ["F"] if plan.forward_only else ["F", "B"]
    if plan.recomputes:
        kinds.insert(1, "R")
    if plan.split_backward:
        kinds.append("W")
    chunks = [chunk for owner, chunk in plan.stages if owner == rank]
    slices = range(plan.slices)
    passes = [Pass(kind, 0, chunk, s) for kind in kinds for chunk in chunks for s in slices]
    inserted = (kind for kind in plan.treatment.passes if kind != "IB" or not plan.forward_only)
    return (*passes, *(Pass(kind, 0, 0, s) for kind in inserted for s in slices))


def evaluation_plan(plan: Plan) -> Plan:
    """Return the evaluation plan with the same stages and treatment: IF, F, S, E and T.

    In an evaluation, T only reads the loss from the statistics that the barriers have merged.
    """
    kinds = {"F", *plan.treatment.passes} - {"IB"}
    rows = tuple(tuple(p for p in row if p.kind in kinds) for row in plan.rows)
    return replace(plan, rows=rows, forward_only=True, pairs=frozenset(), offloaded=0)


def plan_of_one(plan: Plan) -> Plan:
    """Return the plan of the first microbatch alone, with its passes in the same order.

    No dependency crosses microbatches, so if ``plan`` can be run, the returned plan can be run. All
    its activations stay on the device.
    """
    rows = tuple(tuple(p for p in row if p.microbatch == 0) for row in plan.rows)
    return replace(plan, rows=rows, microbatches=1, pairs=frozenset(), offloaded=0)


def with_recomputation(plan: Plan) -> Plan:
    """Return ``plan`` with an R before every B; R computes a chunk again for its backward.

    If layers are computed again within B, this work begins only when the gradient has arrived. R,
    as a pass of its own, needs only the F of its chunk. So a rank can run R while it waits for a
    gradient, and the ranks that wait for its B get their gradient earlier. No pass ends later than
    in ``plan``, where B takes the time of R and B together. R stands before the pair that its B is
    in. A plan that already has R passes is returned unchanged.
    """
    if plan.recomputes:
        return plan

    def parts(step: tuple[Pass, ...]) -> tuple[Pass, ...]:
        return (*(item._replace(kind="R") for item in step if item.kind == "B"), *step)

    rows = (
        tuple(part for step in plan.steps(rank) for part in parts(step))
        for rank in range(plan.ranks)
    )
    return replace(plan, rows=tuple(rows))
