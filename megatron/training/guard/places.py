"""The places of all ranks in their programs, and the ranks that hold up the others.

Pure functions from places to text; ``roll_call`` collects the places.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from megatron.parallel.groups import Groups
from megatron.runtime.position import Position
from megatron.schedules.lower import Run
from megatron.schedules.needs import HOST_KINDS, REPLICA_KINDS, Comm, participants
from megatron.training.words import ranks_in_words


@dataclass(frozen=True)
class Place:
    """The place of one rank in a run and in its program.

    Attributes:
        phase: the part of the run, such as ``iteration 12``.
        instruction: instruction of the program, in words; empty outside of a program.
        awaits: the ranks of the job that the rank waits for, as far as the program tells.
        last_pass: the pass that the rank has finished last; empty if there is none.
        progress: number of programs begun, and of instructions done in the last program.
        idle: seconds since the rank last made progress.
        gives_up: seconds without progress after which the rank would give up.
    """

    phase: str
    instruction: str
    awaits: tuple[int, ...]
    last_pass: str
    progress: tuple[int, int]
    idle: float
    gives_up: float

    def to_text(self) -> str:
        """Return a text form for the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Place":
        """Read a text form."""
        values = json.loads(text)
        for name in ("awaits", "progress"):
            values[name] = tuple(values[name])
        return cls(**values)

    def __str__(self) -> str:
        """Return the place in words."""
        doing = f"{self.phase}: {self.instruction}" if self.instruction else self.phase
        if self.awaits:
            doing += f", waits for {ranks_in_words(self.awaits)}"
        last = f"; last finished pass {self.last_pass}" if self.last_pass else ""
        return f"{doing}; no progress for {self.idle:.0f} s{last}"


def place_of(position: Position, groups: Groups | None, idle: float, gives_up: float) -> Place:
    """Return the place of this rank.

    ``idle`` are the seconds since the position last changed. ``groups`` is ``None`` before the
    ranks are connected.
    """
    step, last, awaited = position.instruction, position.last_pass, position.awaited
    instruction = ""
    if step is not None:
        instruction = f"runs {step.name}" if isinstance(step, Run) else f"{step.comm}"
    return Place(
        phase=position.phase,
        instruction=instruction,
        awaits=() if awaited is None or groups is None else _partners(position, awaited, groups),
        last_pass="" if last is None else str(last),
        progress=(position.programs, position.at),
        idle=idle,
        gives_up=gives_up,
    )


def _partners(position: Position, comm: Comm, groups: Groups) -> tuple[int, ...]:
    """Return the other ranks of the job that take part in a communication.

    For a bucket of gradients, the result has the partners of all buckets of this rank.
    """
    assert position.program is not None, "communications belong to a program"
    if comm.kind in REPLICA_KINDS:
        axes = (groups.gradients, groups.expert_gradients, groups.partial_gradients, groups.ends)
        taking_part = {rank for axis in axes for rank in axis.ranks}
    elif comm.kind in ("X", "G", *HOST_KINDS):
        places = participants(position.program.plan, comm)
        taking_part = {groups.pipeline.ranks[place] for place in places}
    else:
        taking_part = set(groups.vocabulary.ranks)
    return tuple(sorted(taking_part - {groups.world.ranks[groups.world.rank]}))


def hang(places: Mapping[int, Place], size: int) -> str:
    """Return the reason why a job of ``size`` ranks hangs; empty if a rank may still go on.

    ``places`` has the places of the ranks that have answered.
    """
    missing = [rank for rank in range(size) if rank not in places]
    if missing:
        return told_lost(places, missing)
    if any(place.idle < place.gives_up for place in places.values()):
        return ""
    stuck = holding_up(places)
    idle = min(place.idle for place in places.values())
    if len(stuck) == size > 1:
        return f"no rank has made progress for {idle:.0f} s, and each waits for others"
    where = "; ".join(f"rank {rank} is stuck in {places[rank]}" for rank in stuck)
    return f"no rank has made progress for {idle:.0f} s: {where}"


def told_lost(places: Mapping[int, Place], missing: Sequence[int]) -> str:
    """Return the message on ranks that do not answer; ``places`` are of the other ranks."""
    waiting = [rank for rank, place in sorted(places.items()) if set(place.awaits) & set(missing)]
    met = f"; {ranks_in_words(waiting)} waited for it" if waiting else ""
    return (
        f"{ranks_in_words(missing)} {'was' if len(missing) == 1 else 'were'} lost: no answer, so "
        f"the process has ended or is stopped, or its machine is out of reach{met}"
    )


def holding_up(places: Mapping[int, Place]) -> list[int]:
    """Return the ranks that wait for nobody; if all wait, the ranks with the least progress."""
    in_order = sorted(places.items())
    free = [rank for rank, place in in_order if place.instruction and not place.awaits]
    if free:
        return free
    furthest = min(place.progress for place in places.values())
    return [rank for rank, place in in_order if place.progress == furthest]


def table(places: Mapping[int, Place], size: int) -> Iterator[str]:
    """Yield a line on the place of every rank."""
    for rank in range(size):
        yield f"[rank {rank}] {places.get(rank, 'no answer')}"
