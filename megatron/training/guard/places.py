"""The places of all ranks in their programs, and the ranks that hold up the others.

Pure functions from places to text; ``roll_call`` collects the places.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from megatron.parallel.groups import Groups
from megatron.runtime.device_progress import DeviceError
from megatron.runtime.position import Position, awaited_in, last_pass_of
from megatron.schedules.lower import Instruction, Program, Run
from megatron.schedules.needs import HOST_KINDS, REPLICA_KINDS, Comm, participants
from megatron.training.guard.entered import Entered, entered_by, missed_by, stalled
from megatron.training.words import ranks_in_words

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """The place of one rank in a run and in its program.

    On CUDA the host issues its instructions ahead of the GPU. The place is that of the GPU then,
    unless the GPU has finished all that it was given.

    Attributes:
        phase: the part of the run, such as ``iteration 12``.
        instruction: instruction of the program, in words; empty outside of a program.
        awaits: the ranks of the job that the rank waits for, as far as the program tells.
        last_pass: the pass that the rank has finished last; empty if there is none.
        progress: number of programs begun, and of instructions done in the last program.
        idle: seconds since the rank last made progress.
        gives_up: seconds without progress after which the rank would give up.
        host: instruction of the host, in words, if the place is that of its GPU.
        entered: how far the rank has come in the collectives of its groups.
    """

    phase: str
    instruction: str
    awaits: tuple[int, ...]
    last_pass: str
    progress: tuple[int, int]
    idle: float
    gives_up: float
    host: str = ""
    entered: tuple[Entered, ...] = ()

    def to_text(self) -> str:
        """Return a text form for the other ranks."""
        entered = [own.values() for own in self.entered]
        return json.dumps({**vars(self), "entered": entered})

    @classmethod
    def from_text(cls, text: str) -> "Place":
        """Read a text form."""
        values = json.loads(text)
        for name in ("awaits", "progress"):
            values[name] = tuple(values[name])
        values["entered"] = tuple(map(Entered.of, values["entered"]))
        return cls(**values)

    def __str__(self) -> str:
        """Return the place in words."""
        doing = f"{self.phase}: {self.instruction}" if self.instruction else self.phase
        if self.awaits:
            doing += f", waits for {ranks_in_words(self.awaits)}"
        ahead = f"; its host is at {self.host}" if self.host else ""
        last = f"; last finished pass {self.last_pass}" if self.last_pass else ""
        return f"{doing}{ahead}; no progress for {self.idle:.0f} s{last}"


def place_of(
    position: Position,
    groups: Groups | None,
    idle: float,
    gives_up: float,
) -> Place:
    """Return the place of this rank; the GPU and the flight recorder are asked.

    ``idle`` are the seconds since the position last changed. ``groups`` is ``None`` before the
    ranks are connected.
    """
    step = position.instruction
    place = Place(
        phase=position.phase,
        instruction=_in_words(step),
        awaits=_awaits(position.program, step, groups),
        last_pass=_last(position.row[: position.at]),
        progress=(position.programs, position.at),
        idle=idle,
        gives_up=gives_up,
    )
    try:
        found = None if position.device is None else position.device.place()
    except DeviceError as error:
        # Nor may the recorder be asked, which asks the same driver without any patience.
        return replace(place, instruction=str(error), awaits=(), host=place.instruction)
    place = replace(place, entered=() if groups is None else _entered(groups))
    if found is None:
        return place
    program, row, at, programs = found
    return replace(
        place,
        instruction=f"its GPU {'' if isinstance(row[at], Run) else 'at '}{_in_words(row[at])}",
        awaits=_awaits(program, row[at], groups),
        last_pass=_last(row[:at]),
        progress=(programs, at),
        host=place.instruction or "the end of its program",
    )


def _entered(groups: Groups) -> tuple[Entered, ...]:
    """Return how far this rank has come in its groups; nothing if PyTorch does not tell it."""
    try:
        if groups.device.type == "cuda":
            torch.cuda.set_device(groups.device)  # of this thread, which begins with GPU 0
        return entered_by(groups)
    except Exception:  # another version's form; the table of places must not fail by it
        _LOG.debug("PyTorch's flight recorder cannot be read", exc_info=True)
        return ()


def _in_words(step: Instruction | None) -> str:
    if step is None:
        return ""
    return f"runs {step.name}" if isinstance(step, Run) else f"{step.comm}"


def _last(done: Sequence[Instruction]) -> str:
    last = last_pass_of(done)
    return "" if last is None else str(last)


def _awaits(
    program: Program | None, step: Instruction | None, groups: Groups | None
) -> tuple[int, ...]:
    """Return the other ranks that take part in the communication for which a step waits, if any."""
    comm = awaited_in(step)
    if comm is None or program is None or groups is None:
        return ()
    return _partners(program, comm, groups)


def _partners(program: Program, comm: Comm, groups: Groups) -> tuple[int, ...]:
    """Return the other ranks of the job that take part in a communication.

    For a bucket of gradients, the result has the partners of all buckets of this rank.
    """
    if comm.kind in REPLICA_KINDS:
        axes = (groups.gradients, groups.expert_gradients, groups.partial_gradients, groups.ends)
        taking_part = {rank for axis in axes for rank in axis.ranks}
    elif comm.kind in ("X", "G", *HOST_KINDS):
        places = participants(program.plan, comm)
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
    places = with_missed(places)
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


def with_missed(places: Mapping[int, Place]) -> dict[int, Place]:
    """Return places that wait also for the ranks that are missing in their collectives.

    A place that is known to wait for a communication of its program stays as it is.
    """
    entered = {rank: place.entered for rank, place in places.items()}
    found = dict(places)
    for rank, place in places.items():
        if not place.awaits:
            missed = missed_by(rank, entered, in_pass=bool(place.instruction))
            found[rank] = replace(place, awaits=missed)
    return found


def holding_up(places: Mapping[int, Place]) -> list[int]:
    """Return the ranks that wait for nobody; if all wait, the ranks with the least progress.

    Between programs a rank waits for nobody that is known. Such a rank counts only if others wait
    for it.
    """
    in_order = sorted(places.items())
    free = [rank for rank, place in in_order if place.instruction and not place.awaits]
    if free:
        return free
    awaited = {rank for place in places.values() for rank in place.awaits}
    held = [rank for rank, place in in_order if rank in awaited and not place.awaits]
    if held:
        return held
    furthest = min(place.progress for place in places.values())
    return [rank for rank, place in in_order if place.progress == furthest]


def table(places: Mapping[int, Place], size: int) -> Iterator[str]:
    """Yield a line on the place of every rank, and on every collective that ranks wait in."""
    known = with_missed(places)
    for rank in range(size):
        yield f"[rank {rank}] {known.get(rank, 'no answer')}"
    yield from stalled({rank: place.entered for rank, place in sorted(places.items())})
