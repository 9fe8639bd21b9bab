"""A request says which plan is wanted. It refuses all faults that show before the plan is made."""

from dataclasses import KW_ONLY, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Final

from megatron.schedules.block_options import BlockOptions
from megatron.schedules.catalogue import (
    OPTIONS,
    SCHEDULE_NAMES,
    SCHEDULES,
    TRAITS,
    Schedule,
    Traits,
    takers,
)
from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.counted import counted
from megatron.schedules.plan_flags import PLAN_FLAGS
from megatron.schedules.treatments import TREATMENTS, Treatment

VOCABULARY_TREATMENTS: Final[tuple[str, ...]] = tuple(TREATMENTS)
DEFAULT_SECONDS: Final = 60.0

MOST_FORWARDS: Final = 4_000_000
"""Forward passes of the largest plan, of all ranks together; more are a mistyped number."""


@dataclass(frozen=True)
class Request:
    """Which plan is wanted.

    Attributes:
        schedule: a name of ``SCHEDULE_NAMES``.
        vocabulary: a name of ``VOCABULARY_TREATMENTS``.
        ranks: pipeline ranks p.
        microbatches: microbatches m of an iteration.
        costs: durations, by which passes are placed; accurate costs give a better plan. They are
            the costs of one chunk. For ``auto``, which compares schedules with different numbers of
            chunks, they are the costs of all chunks of a rank together.
        slices: slices n into which every microbatch is cut along its sequence.
        chunks: model chunks per rank, for a schedule of ``CHUNKED_SCHEDULES``.
        options: options of the block, for a schedule that takes them.
        memory_limit: the most microbatches that a rank may have in flight. ``zb-auto`` needs a
            limit; the limit of ``optimal`` is by default p plus the number of barriers; other
            schedules have no default limit. A schedule that ``fills`` may use the whole limit for a
            shorter plan, and a request for pairs may too.
        rank_limits: the most microbatches that each rank may have in flight, where ranks differ;
            ``memory_limit`` is then the largest of them. Empty: it is the limit of every rank.
        split_backward: make W a separate pass even if the schedule itself does not split it off.
        file: the plan in text form, for ``file``.
        seconds: time that ``optimal`` may take.
        recompute_ahead: the number of chunks that a rank may hold between R and B; R is then a
            separate pass that computes activations again. ``None``: B computes them again.
        shortened: whether to fill idle time; if not, the passes stay in the order of the block.
        quick: whether to limit the search to ``EFFORT_QUICK``, for a plan that is only looked at.
        joined: whether to join each F with a B near it, where the plan does not become longer.
            Without a memory limit a rank may hold one microbatch more for it.
        joins_all: whether ``joined`` also means other neighbours that save time together: W, S, T
            or IB with an F or a B.

    Raises:
        ValueError: for an unknown name, a count below 1, a memory limit below 1, an option that the
            schedule does not take, or a missing option that it needs.
    """

    schedule: str
    vocabulary: str
    ranks: int
    microbatches: int
    costs: Costs = UNIT_COSTS
    _: KW_ONLY
    slices: int = 1
    chunks: int | None = None
    options: BlockOptions = field(default_factory=BlockOptions)
    memory_limit: float | None = None
    rank_limits: tuple[float, ...] = ()
    split_backward: bool = False
    file: Path | None = None
    seconds: float = DEFAULT_SECONDS
    recompute_ahead: int | None = None
    shortened: bool = True
    quick: bool = False
    joined: bool = False
    joins_all: bool = False

    def __post_init__(self) -> None:
        self._refuse_names()
        self._refuse_numbers()
        self._refuse_unused()
        self._refuse_chunks()
        self._refuse_lack()

    @property
    def traits(self) -> Traits:
        """The facts about the schedule."""
        return TRAITS[self.schedule]

    @property
    def catalogued(self) -> Schedule:
        """The row of the catalogue of a schedule that has a block, with the wanted options."""
        return SCHEDULES[self.schedule].made_with(self.options.values)

    @property
    def treatment(self) -> Treatment:
        """The treatment of the vocabulary."""
        return TREATMENTS[self.vocabulary]

    @property
    def limits(self) -> tuple[float, ...]:
        """The most microbatches that each rank may have in flight; empty: there is no limit."""
        if self.memory_limit is None:
            return ()
        return self.rank_limits or (self.memory_limit,) * self.ranks

    def within(self, limits: tuple[float, ...]) -> "Request":
        """Return the request with a limit for each rank; empty: without any limit."""
        own = limits if len(set(limits)) > 1 else ()
        return replace(self, memory_limit=max(limits, default=None), rank_limits=own)

    @property
    def units(self) -> int:
        """Number of units, the slices of all microbatches."""
        return self.microbatches * self.slices

    def _refuse_names(self) -> None:
        if self.schedule not in TRAITS:
            raise ValueError(
                f"unknown schedule '{self.schedule}': choose one of {', '.join(SCHEDULE_NAMES)}"
            )
        if self.vocabulary not in TREATMENTS:
            raise ValueError(
                f"unknown vocabulary treatment '{self.vocabulary}': choose one of "
                f"{', '.join(VOCABULARY_TREATMENTS)}"
            )

    def _refuse_numbers(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a pipeline needs at least 1 rank, got {self.ranks}")
        if self.microbatches < 1:
            raise ValueError(f"an iteration needs at least 1 microbatch, got {self.microbatches}")
        if self.slices < 1:
            raise ValueError(
                f"a microbatch has at least 1 slice, got {self.slices}: 1 leaves it whole"
            )
        for given in self.options.given:
            if fault := given.fault(self.ranks):
                raise ValueError(fault)
        chunks = self.chunks or self.traits.chunks
        if (forwards := self.ranks * chunks * self.units) > MOST_FORWARDS:
            cut = f" x {counted(self.slices, 'slice')}" if self.slices > 1 else ""
            raise ValueError(
                f"{self.ranks} ranks x {chunks} chunks x {self.microbatches} microbatches{cut} are "
                f"{forwards:,} forward passes, and a plan has at most {MOST_FORWARDS:,}: take fewer"
            )
        if self.recompute_ahead is not None and self.recompute_ahead < 1:
            raise ValueError(
                f"a B needs at least 1 chunk computed again, got {self.recompute_ahead}: leave it "
                "out to compute again within B"
            )
        if self.memory_limit is not None and not 1 <= self.memory_limit < inf:
            raise ValueError(
                f"a memory limit of {self.memory_limit:g} microbatches a rank fits no schedule: "
                "the least that would is 1"
            )
        if self.rank_limits and (
            len(self.rank_limits) != self.ranks
            or max(self.rank_limits) != self.memory_limit
            or not min(self.rank_limits) >= 1
        ):
            raise ValueError(
                f"limits {self.rank_limits} are not those of {counted(self.ranks, 'rank')}: give a "
                f"number of at least 1 for each, the largest of them {self.memory_limit}"
            )

    def _refuse_unused(self) -> None:
        for option, known in OPTIONS.items():
            value, default = getattr(self, option), getattr(Request, option)
            if value != default and option not in self.traits.options:
                why = known.unused.format(" or ".join(takers(known.flag)))
                raise ValueError(
                    f"{self.schedule} has no use for {option}={value}: {why}; leave it out"
                )
        for given in self.options.given:
            if not given.is_taken_by(self.traits):
                raise ValueError(
                    f"{self.schedule} has no use for {given}: {given.unused}; leave it out"
                )

    def _refuse_chunks(self) -> None:
        fault = None if self.chunks is None else self.traits.chunks_fault(self.chunks)
        if fault is not None:
            raise ValueError(f"{self.schedule} {fault}")

    def _refuse_lack(self) -> None:
        if self.schedule == "file" and self.file is None:
            raise ValueError("a plan file goes with the schedule 'file', and that needs one")
        if self.traits.needs_memory_limit and self.memory_limit is None:
            raise ValueError(
                f"{self.schedule} fills the memory it is given: give it a memory limit "
                f"({PLAN_FLAGS['memory_limit'][0]})"
            )
        if self.schedule == "optimal" and self.treatment.synchronous:
            raise ValueError(
                f"optimal does not know ranks that meet: take zb-auto for {self.vocabulary}"
            )
