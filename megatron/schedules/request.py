"""What plan is wanted, and what can be refused before anything is made."""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.plan import VOCABULARY_BARRIERS

SCHEDULE_NAMES: Final[tuple[str, ...]] = (*SCHEDULES, "zb-auto", "optimal", "auto", "file")
VOCABULARY_TREATMENTS: Final[tuple[str, ...]] = tuple(VOCABULARY_BARRIERS)
DEFAULT_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Request:
    """What plan is wanted.

    Attributes:
        schedule: a name of ``SCHEDULE_NAMES``.
        vocabulary: a name of ``VOCABULARY_TREATMENTS``.
        ranks: pipeline ranks p.
        microbatches: microbatches m of an iteration.
        costs: durations, the better for being true: passes are placed by them. Of one chunk of the
            schedule; for ``auto``, which compares schedules, of all chunks of a rank together.
        chunks: model chunks of a rank, for ``interleaved``.
        memory_limit: the most microbatches that a rank may have in flight; needed by ``zb-auto``,
            by default p and one for every barrier for ``optimal``, and none for the others.
        split_backward: make W a pass of its own where the schedule does not do so by itself.
        file: the plan in text form, for ``file``.
        seconds: time that ``optimal`` may take.
        tightened: fill idle time; without, the plan of a block is in the block's own order.
    """

    schedule: str
    vocabulary: str
    ranks: int
    microbatches: int
    costs: Costs = UNIT_COSTS
    chunks: int | None = None
    memory_limit: float | None = None
    split_backward: bool = False
    file: Path | None = None
    seconds: float = DEFAULT_SECONDS
    tightened: bool = True

    @property
    def barriers(self) -> int:
        """How many more microbatches the barriers keep in flight."""
        return VOCABULARY_BARRIERS[self.vocabulary] or 0


def refuse(request: Request) -> None:
    """Refuse what can be refused before anything is made.

    Raises:
        ValueError: naming the value and the way out.
    """
    if request.schedule not in SCHEDULE_NAMES:
        raise ValueError(
            f"unknown schedule '{request.schedule}': choose one of {', '.join(SCHEDULE_NAMES)}"
        )
    if request.vocabulary not in VOCABULARY_BARRIERS:
        raise ValueError(
            f"unknown vocabulary treatment '{request.vocabulary}': choose one of "
            f"{', '.join(VOCABULARY_TREATMENTS)}"
        )
    if request.ranks < 1:
        raise ValueError(f"a pipeline needs at least 1 rank, got {request.ranks}")
    if request.microbatches < 1:
        raise ValueError(f"an iteration needs at least 1 microbatch, got {request.microbatches}")
    limit = request.memory_limit
    if limit is not None and not 1 <= limit < inf:
        raise ValueError(
            f"a memory limit of {limit:g} microbatches a rank fits no schedule: the least that "
            "would is 1"
        )
    if (request.schedule == "file") != (request.file is not None):
        raise ValueError("a plan file goes with the schedule 'file', and that needs one")
    if request.schedule == "optimal" and request.vocabulary == "interlaced":
        raise ValueError("optimal does not know ranks that meet: take zb-auto for interlaced")
    if request.schedule == "zb-auto" and limit is None:
        raise ValueError("zb-auto fills the memory it is given: give it a memory limit")
