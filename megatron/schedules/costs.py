"""How long passes and communications take.

Schedules place passes by these costs, and the simulator computes its timeline from them. Costs
never decide whether a run is correct.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Final, Literal

from megatron.schedules.counted import counted
from megatron.schedules.needs import REPLICA_KINDS, Comm, CommKind
from megatron.schedules.pair_steps import FindsSteps
from megatron.schedules.pair_time import InTurns, joined_time
from megatron.schedules.passes import CHUNKED_KINDS, Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.slice_lengths import slice_shares
from megatron.schedules.turn_order import TurnOrder

Time = float | Sequence[float] | Sequence[Sequence[float]]
"""One time for all ranks, one for each rank, or one for each rank and chunk."""

HopTime = float | Sequence[float]
"""One time for all hops from stage to stage, or one for each."""


@dataclass(frozen=True)
class Exchange:
    """Time of a rank's exchange with its replicas: of gradients (RG) or of parameters (AG).

    Attributes:
        times: for every pipeline rank, the time of all its buckets together.
        latency: time that every bucket takes in addition, however small the bucket is.
    """

    times: Sequence[float]
    latency: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Time of every pass and communication, in any one unit.

    Attributes:
        passes: time of one pass of one chunk, by kind. If W is absent, B is the whole backward. If
            W is given, B is the input gradient alone, and the backward of a plan without W passes
            takes B + W. If R is given, the backward of a plan without R passes takes R in addition.
            If R is absent, an R pass takes as long as F. The time of U is that of all buckets of a
            rank together; if U is absent, it takes no time.
        comms: time of a communication, by kind; absent kinds take no time. X and G may have one
            time for each hop; hop k is between stages k and k + 1. The time of RG or AG is that of
            all buckets of a rank together. O (a copy of activations to the host) and L (a copy
            back) may have one time for each stage.
        exchanges: times of RG and AG in place of those in ``comms``. Each gives the time of every
            pipeline rank, and a latency that each bucket adds.
        waits: the part of the time of F, R, B or W in which the pass only waits for collectives
            with other ranks of its stage; absent kinds wait for nothing. The other pass of a pair
            works meanwhile.
        journeys: for each kind of pass, how often it lets the other pass of a pair work: in a kind
            of ``waits`` at every collective, by default twice; in another kind where the pass
            can be interrupted, by default nowhere.
        turns: for each kind of pass of which it is known, what a pass of every rank and chunk does
            in a pair. ``waits`` and ``journeys`` are sums over these steps.
        slices: for every slice of a microbatch, the costs of its passes and communications; empty:
            each of n slices takes an n-th of these costs. U, RG and AG have no slices.

    Raises:
        ValueError: if a time is negative, infinite or no number.
    """

    passes: Mapping[PassKind, Time]
    comms: Mapping[CommKind, HopTime] = field(default_factory=dict)
    exchanges: Mapping[CommKind, Exchange] = field(default_factory=dict)
    waits: Mapping[PassKind, Time] = field(default_factory=dict)
    journeys: Mapping[PassKind, Time] = field(default_factory=dict)
    turns: Mapping[PassKind, Sequence[Sequence[FindsSteps]]] = field(
        default_factory=dict, compare=False
    )
    slices: "Sequence[Costs]" = ()

    def __post_init__(self) -> None:
        exchanges = ((kind, (*own.times, own.latency)) for kind, own in self.exchanges.items())
        times = [*self.passes.items(), *self.waits.items(), *self.comms.items(), *exchanges]
        for kind, time in times:
            for value in _flat(time):
                if not (isfinite(value) and value >= 0):
                    raise ValueError(
                        f"{kind}={value:g} is no cost: a time is a finite number, 0 or more"
                    )

    def __hash__(self) -> int:
        """Return a hash of all times; lists and mappings of times count as tuples."""
        exchanges = ((kind, tuple(own.times), own.latency) for kind, own in self.exchanges.items())
        tables: tuple[Mapping[Any, Any], ...] = (
            self.passes,
            self.comms,
            self.waits,
            self.journeys,
        )
        return hash((*map(_frozen, tables), frozenset(exchanges), tuple(self.slices)))

    def of_pass(self, plan: Plan, rank: int, item: Pass, share: float = 1.0) -> float:
        """Return the time of ``item`` on ``rank``.

        Args:
            plan: the plan that runs.
            rank: pipeline rank.
            item: the pass.
            share: the part of the given cost: 1, or less for one of several buckets. A slice's part
                of its microbatch is not included.

        Raises:
            ValueError: if no cost is known for its kind, or none for that rank or chunk; or if the
                costs are of another number of slices.
        """
        if item.kind == "U":
            return share * self.time("U", rank) if "U" in self.passes else 0.0
        own, part_of_it = self._of_slice(plan.slices, item.slice)
        parts = own._parts(plan, item)
        return share * part_of_it * sum(own.time(part, rank, item.chunk) for part in parts)

    def waits_of(self, plan: Plan, rank: int, item: Pass) -> float:
        """Return the part of the time of ``item`` in which it waits for an exchange.

        Raises:
            ValueError: if a wait is longer than its pass, or none is known for that rank or chunk.
        """
        own, share = self._of_slice(plan.slices, item.slice)
        total = 0.0
        for part in own._parts(plan, item) if own.waits else ():
            if part in own.waits:
                wait = _at(own.waits[part], part, rank, item.chunk)
                time = own.time(part, rank, item.chunk)
                if wait > time:
                    raise ValueError(
                        f"{part} takes {time:g} and waits {wait:g} of it: the wait is a part of "
                        "the time"
                    )
                total += wait
        return share * total

    def journeys_of(self, plan: Plan, rank: int, item: Pass) -> int:
        """Return how often ``item`` lets the other pass of its pair work."""
        own, _ = self._of_slice(plan.slices, item.slice)
        times = (
            own.journeys.get(part, 2 if part in own.waits else 0) for part in own._parts(plan, item)
        )
        return sum(int(_at(time, item.kind, rank, item.chunk)) for time in times)

    def in_turns(self, plan: Plan, rank: int, item: Pass) -> InTurns:
        """Return ``item`` as a pass of a pair."""
        own, _ = self._of_slice(plan.slices, item.slice)
        known = own.turns.get(item.kind)
        whole = own._parts(plan, item) == [item.kind]  # and no W or R that is priced apart
        steps = known[rank][item.chunk] if known is not None and whole else None
        return InTurns(
            item.kind,
            self.of_pass(plan, rank, item),
            self.waits_of(plan, rank, item),
            self.journeys_of(plan, rank, item),
            steps,
        )

    def of_pair(
        self,
        plan: Plan,
        rank: int,
        pair: tuple[Pass, Pass],
        *,
        crowds: bool = True,
        turns: TurnOrder | Literal["quickest"] | None = "quickest",
    ) -> float:
        """Return the time of a pair, in which each pass works while the other one waits.

        With ``crowds``, its collectives slow the pass that works meanwhile, if that is known.
        ``turns`` are those of a program (``joined_time``), or the quickest that are known.
        """
        one, other = (self.in_turns(plan, rank, item) for item in pair)
        return joined_time(one, other, crowds=crowds, turns=turns)

    def _of_slice(self, slices: int, number: int) -> "tuple[Costs, float]":
        """Return the costs of which a slice takes a share, and this share."""
        if not self.slices:
            return self, 1 / slices
        if len(self.slices) != slices:
            raise ValueError(
                f"there are costs of {counted(len(self.slices), 'slice')} of a microbatch, and the "
                f"plan has {slices}: give costs of as many"
            )
        return self.slices[number], 1.0

    def _parts(self, plan: Plan, item: Pass) -> list[PassKind]:
        """Return the kinds of passes whose times together are the time of ``item``."""
        kind: PassKind = "F" if item.kind == "R" and "R" not in self.passes else item.kind
        if kind != "B":
            return [kind]
        within: dict[PassKind, bool] = {"R": not plan.recomputes, "W": not plan.split_backward}
        return [kind, *(part for part, own in within.items() if own and part in self.passes)]

    def of_comm(self, comm: Comm, share: float = 1.0, slices: int = 1) -> float:
        """Return the time of ``comm``.

        Args:
            comm: the communication.
            share: the part of the given cost: 1, or less for one of several buckets. A slice's part
                of its microbatch is not included.
            slices: slices of a microbatch in the plan.

        Raises:
            ValueError: if each hop has its own time, and the hop of ``comm`` has none.
        """
        exchange = self.exchanges.get(comm.kind)
        if exchange is not None:
            return exchange.latency + share * exchange.times[comm.stage]
        if comm.kind not in REPLICA_KINDS and max(slices, len(self.slices)) > 1:
            own, part = self._of_slice(slices, comm.slice)
            return own.of_comm(comm, share * part)
        time = self.comms.get(comm.kind, 0.0)
        if isinstance(time, (int, float)):
            return share * time
        # G goes back from its stage, over the hop that X has taken from the stage before.
        hop = comm.stage - (comm.kind == "G")
        if hop >= len(time):
            raise ValueError(
                f"{comm.kind} has {len(time)} times and none for hop {hop}, from stage {hop} to "
                f"{hop + 1}: give one time, or one for each hop"
            )
        return share * time[hop]

    def per_chunk(self, chunks: int) -> "Costs":
        """Return the costs of one of ``chunks`` equal chunks, from the costs of all together.

        Raises:
            ValueError: if ``self`` has costs by chunk.
        """
        passes, waits = dict(self.passes), dict(self.waits)
        for times in (passes, waits):
            for kind in CHUNKED_KINDS:
                if kind in times:
                    times[kind] = _divided(times[kind], chunks)
        slices = tuple(own.per_chunk(chunks) for own in self.slices)
        return replace(self, passes=passes, waits=waits, turns={}, slices=slices)

    def in_slices(self, lengths: Sequence[int], attention: Mapping[PassKind, float]) -> "Costs":
        """Return the costs of a microbatch that is cut into slices.

        A slice takes as long as its tokens, and its attention as long as its tokens and the keys
        that they read, which are those of all earlier slices too.

        Args:
            lengths: the length of every slice.
            attention: the share of the time of a pass of the whole microbatch that attention takes,
                by kind; 0 for absent kinds.
        """
        alike = slice_shares(lengths)
        shares = {kind: slice_shares(lengths, share) for kind, share in attention.items()}

        def of(number: int) -> "Costs":
            def scaled(times: Mapping[PassKind, Time]) -> dict[PassKind, Time]:
                return {
                    kind: _times(time, shares.get(kind, alike)[number])
                    for kind, time in times.items()
                }

            part = alike[number]
            comms = {kind: _times(time, part) for kind, time in self.comms.items()}
            waits = scaled(self.waits)
            return Costs(scaled(self.passes), comms, waits=waits, journeys=self.journeys)

        return replace(self, slices=tuple(map(of, range(len(lengths)))))

    def without_waits(self) -> "Costs":
        """Return the costs of passes whose waits are all hidden."""
        passes = {
            kind: _less(time, self.waits[kind]) if kind in self.waits else time
            for kind, time in self.passes.items()
        }
        slices = tuple(own.without_waits() for own in self.slices)
        return replace(self, passes=passes, waits={}, turns={}, slices=slices)

    def time(self, kind: PassKind, rank: int, chunk: int = 0) -> float:
        """Return the given time of a kind of pass.

        Args:
            kind: the kind of pass.
            rank: pipeline rank.
            chunk: model chunk.

        Raises:
            ValueError: if no cost is known for the kind, or none for that rank or chunk.
        """
        time = self.passes.get(kind)
        if time is None:
            raise ValueError(f"no cost is given for {kind} passes: give {kind}=TIME")
        return _at(time, kind, rank, chunk)


def _at(time: Time, kind: PassKind, rank: int, chunk: int) -> float:
    """Return the time of a chunk of a rank.

    Raises:
        ValueError: if there is none for that rank or chunk.
    """
    for index, word in ((rank, "rank"), (chunk, "chunk")):
        if isinstance(time, (int, float)):
            break
        if index >= len(time):
            raise ValueError(
                f"{kind} has {len(time)} times and none for {word} {index}: give one time, or "
                f"one for each {word}"
            )
        time = time[index]
    assert isinstance(time, (int, float))
    return time


def _frozen(times: Mapping[Any, Any]) -> frozenset[tuple[Any, Any]]:
    """Return a mapping of times in a form that has a hash."""
    return frozenset((kind, _tuples(time)) for kind, time in times.items())


def _tuples(time: Any) -> Any:
    """Return ``time``, a number or nested lists of numbers, with tuples in place of lists."""
    return time if isinstance(time, (int, float)) else tuple(map(_tuples, time))


def _flat(time: Time) -> Iterator[float]:
    if isinstance(time, (int, float)):
        yield time
    else:
        for part in time:
            yield from _flat(part)


def _less(time: Any, part: Any) -> Any:
    """Return ``time`` less ``part``; both are numbers, or nested lists of the same form."""
    if isinstance(time, (int, float)):
        if isinstance(part, (int, float)):
            return time - part
        return [_less(time, own) for own in part]
    parts = [part] * len(time) if isinstance(part, (int, float)) else part
    return [_less(own, each) for own, each in zip(time, parts, strict=True)]


def _times(time: Any, factor: float) -> Any:
    """Return ``time``, a number or nested lists of numbers, multiplied by ``factor``."""
    if isinstance(time, (int, float)):
        return time * factor
    return [_times(own, factor) for own in time]


def _divided(time: Time, parts: int) -> Time:
    if isinstance(time, (int, float)):
        return time / parts
    return [_of_rank(part, parts) for part in time]


def _of_rank(time: float | Sequence[float], parts: int) -> float:
    if isinstance(time, (int, float)):
        return time / parts
    raise ValueError("costs by chunk cannot be divided into other chunks: give one time for a rank")


UNIT_COSTS: Final = Costs(
    {"F": 1.0, "B": 1.0, "W": 1.0, "S": 0.25, "E": 0.05, "T": 0.25, "IF": 0.05, "IB": 0.05}
)
"""Durations assumed if nothing was measured; only the order that they lead to matters."""
