"""An iteration with the exchange between replicas, and the part of it that the passes hide."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from megatron.schedules.buckets import Bucket, Touch, with_reductions, with_updates
from megatron.schedules.costs import Costs, Exchange
from megatron.schedules.lower import Program
from megatron.schedules.needs import REPLICA_KINDS, CommKind
from megatron.schedules.passes import PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.clocks import Clocks, comm_time
from megatron.simulator.costs.collective_time import Path
from megatron.simulator.costs.replicas import Replicas

_TINY: Final = 1e-9


@dataclass(frozen=True)
class Overlap:
    """The work with replicas that a program contains, and the places of this work.

    Attributes:
        reduce: reduce each bucket as soon as its gradients are complete; otherwise reduce all
            buckets after the last pass.
        updates: begin the program with the update of the parameters, for a sharded optimizer.
        gather: let a pass run during a gathering whose parameters the pass does not read; otherwise
            the first pass comes after all gatherings.
    """

    reduce: bool = False
    updates: bool = False
    gather: bool = False

    def added_to(self, program: Program, buckets: Sequence[Sequence[Bucket]]) -> Program:
        """Return the program with this work added, for the ``buckets`` of every rank."""
        program = with_reductions(program, buckets, overlap=self.reduce)
        return with_updates(program, buckets, overlap=self.gather) if self.updates else program


@dataclass(frozen=True)
class EvenBuckets:
    """Buckets of a plan whose model is not known.

    All chunks of a rank, and all its split vocabulary layers, count as having equally many
    parameters.

    Attributes:
        overlap: the work done with the buckets.
        cut: number of buckets of each chunk or layer.
    """

    overlap: Overlap
    cut: int = 1

    def of(self, plan: Plan) -> list[list[Bucket]]:
        """Return the buckets of every rank."""
        products: PassKind = "W" if plan.split_backward else "B"
        parts: list[tuple[Touch, Touch]] = [
            ((products, chunk), ("F", chunk)) for chunk in range(plan.chunks)
        ]
        if plan.treatment.is_sharded:
            parts += [(("IB", 0), ("IF", 0)), (("T", 0), ("S", 0))]
        share = 1 / (self.cut * len(parts))
        own = [
            Bucket(frozenset({after}), share, frozenset({before}))
            for after, before in parts
            for _ in range(self.cut)
        ]
        return [own] * plan.ranks

    def added_to(self, program: Program) -> Program:
        """Return a program with the work of replicas added."""
        return self.overlap.added_to(program, self.of(program.plan))


@dataclass(frozen=True)
class Exchanges:
    """The exchange of a pipeline's ranks with their replicas.

    Attributes:
        replicas: the number of replicas, and the sizes of the numbers that they exchange.
        link: the link from a rank to its replica.
        buckets: the buckets of every pipeline rank.
        parameters: number of parameters of every pipeline rank, with the padding of its buckets.
        update: for every pipeline rank, the time in which it updates its own part of the
            parameters.
        overlap: the part of the exchange that is in the program of an iteration. If the program has
            no updates, a sharded optimizer updates and gathers after the last pass.
        gathered: as ``parameters``, of the gathering: a parameter that travels in 8 bits counts as
            half of one. ``None``: all travel in 16.
    """

    replicas: Replicas
    link: Path
    buckets: Sequence[Sequence[Bucket]]
    parameters: Sequence[float]
    update: Sequence[float]
    overlap: Overlap
    gathered: Sequence[float] | None = None

    @property
    def bytes_sent(self) -> float:
        """Bytes that a rank sends to its replicas in an iteration; the most over the ranks."""
        return max(
            self.replicas.reduced_bytes(own) + self.replicas.gathered_bytes(gathered)
            for own, gathered in zip(self.parameters, self._gathered, strict=True)
        )

    @property
    def step(self) -> float:
        """Time of the optimizer's step after the program; 0 if the program has the updates."""
        if self.overlap.updates:
            return 0.0
        gathering = self.replicas.gathering(self._gathered, self.link)
        return max(
            update + time + len(own) * gathering.latency
            for update, time, own in zip(self.update, gathering.times, self.buckets, strict=True)
        )

    def added_to(self, program: Program, costs: Costs) -> tuple[Program, Costs]:
        """Return a program with the exchange, and its costs in the link's unit of time."""
        program = self.overlap.added_to(program, self.buckets)
        exchanges: dict[CommKind, Exchange] = {
            "RG": self.replicas.reduction(self.parameters, self.link)
        }
        if not self.overlap.updates:
            return program, replace(costs, exchanges=exchanges)
        exchanges["AG"] = self.replicas.gathering(self._gathered, self.link)
        passes = {**costs.passes, "U": self.update}
        return program, replace(costs, passes=passes, exchanges=exchanges)

    @property
    def _gathered(self) -> Sequence[float]:
        """The number of parameters that every pipeline rank gathers, in 16 bits or as if."""
        return self.parameters if self.gathered is None else self.gathered


@dataclass(frozen=True)
class Hidden:
    """The part of an exchange that the passes hide.

    Attributes:
        alone: time of the exchange on the slowest rank, one bucket after the other.
        added: time that the exchange adds to an iteration.
    """

    alone: float
    added: float

    @property
    def share(self) -> float:
        """Share of the exchange's time by which the iteration does not become longer."""
        share = 1 - self.added / self.alone
        return 0.0 if abs(share) < _TINY else share


def hidden(program: Program, costs: Costs) -> Mapping[CommKind, Hidden]:
    """Return the hidden part of RG and of AG; a kind that takes no time is left out.

    For each kind, the iteration is simulated with and without the time of that kind.
    """
    clocks = Clocks(program, costs)
    whole = clocks.end
    times: dict[CommKind, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for comm in program.shares:
        times[comm.kind][comm.stage] += comm_time(program, costs, comm)
    found: dict[CommKind, Hidden] = {}
    for kind in REPLICA_KINDS:
        alone = max(times[kind].values(), default=0.0)
        if alone:
            without = Clocks(clocks.numbered, _without(costs, kind)).end
            found[kind] = Hidden(alone, whole - without)
    return found


def _without(costs: Costs, kind: CommKind) -> Costs:
    return replace(
        costs,
        comms={other: time for other, time in costs.comms.items() if other != kind},
        exchanges={other: own for other, own in costs.exchanges.items() if other != kind},
    )
