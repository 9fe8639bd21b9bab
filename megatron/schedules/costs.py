"""How long passes and communications take.

Schedules place passes by these costs, and the simulator computes its timeline from them. Costs
never decide whether a run is correct.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Final

from megatron.schedules.needs import Comm, CommKind
from megatron.schedules.passes import CHUNKED_KINDS, Pass, PassKind
from megatron.schedules.plan import Plan

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
            all buckets of a rank together.
        exchanges: times of RG and AG that replace those in ``comms``, for ranks that differ or
            buckets with a latency.

    Raises:
        ValueError: if a time is negative, infinite or no number.
    """

    passes: Mapping[PassKind, Time]
    comms: Mapping[CommKind, HopTime] = field(default_factory=dict)
    exchanges: Mapping[CommKind, Exchange] = field(default_factory=dict)

    def __post_init__(self) -> None:
        exchanges = ((kind, (*own.times, own.latency)) for kind, own in self.exchanges.items())
        for kind, time in [*self.passes.items(), *self.comms.items(), *exchanges]:
            for value in _flat(time):
                if not (isfinite(value) and value >= 0):
                    raise ValueError(
                        f"{kind}={value:g} is no cost: a time is a finite number, 0 or more"
                    )

    def of_pass(self, plan: Plan, rank: int, item: Pass, share: float = 1.0) -> float:
        """Return the time of ``item`` on ``rank``.

        Args:
            plan: the plan that runs.
            rank: pipeline rank.
            item: the pass.
            share: share of the work that the given cost stands for; below 1 for one of several
                buckets.

        Raises:
            ValueError: if no cost is known for its kind, or none for that rank or chunk.
        """
        if item.kind == "U" and "U" not in self.passes:
            return 0.0
        kind: PassKind = "F" if item.kind == "R" and "R" not in self.passes else item.kind
        time = self.time(kind, rank, item.chunk)
        if kind == "B":
            within: dict[PassKind, bool] = {"R": not plan.recomputes, "W": not plan.split_backward}
            parts = (part for part, joined in within.items() if joined and part in self.passes)
            time += sum(self.time(part, rank, item.chunk) for part in parts)
        return share * time

    def of_comm(self, comm: Comm, share: float = 1.0) -> float:
        """Return the time of ``comm``.

        Args:
            comm: the communication.
            share: share of the work that the given cost stands for; below 1 for one of several
                buckets.

        Raises:
            ValueError: if each hop has its own time, and the hop of ``comm`` has none.
        """
        exchange = self.exchanges.get(comm.kind)
        if exchange is not None:
            return exchange.latency + share * exchange.times[comm.stage]
        time = self.comms.get(comm.kind, 0.0)
        if isinstance(time, (int, float)):
            return share * time
        hop = comm.stage if comm.kind == "X" else comm.stage - 1
        if hop >= len(time):
            raise ValueError(
                f"{comm.kind} has {len(time)} times and none for hop {hop}, from stage {hop} to "
                f"{hop + 1}: give one time, or one for each hop"
            )
        return time[hop]

    def per_chunk(self, chunks: int) -> "Costs":
        """Return the costs of one of ``chunks`` equal chunks, from the costs of all together.

        Raises:
            ValueError: if ``self`` has costs by chunk.
        """
        passes = dict(self.passes)
        for kind in CHUNKED_KINDS:
            if kind in passes:
                passes[kind] = _divided(passes[kind], chunks)
        return replace(self, passes=passes)

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


def _flat(time: Time) -> Iterator[float]:
    if isinstance(time, (int, float)):
        yield time
    else:
        for part in time:
            yield from _flat(part)


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
