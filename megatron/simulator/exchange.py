"""An iteration with the exchange between replicas, and how much of it is hidden by the passes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.schedules.buckets import Bucket, Touch, with_reductions, with_updates
from megatron.schedules.costs import Costs, Exchange
from megatron.schedules.lower import Program
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.costs.replicas import Link, Replicas
from megatron.simulator.simulate import simulate


def even_buckets(plan: Plan, cut: int = 1) -> list[list[Bucket]]:
    """Return buckets for a plan whose model is not known.

    A rank has as many parameters in each of its chunks, and in each vocabulary layer that is split,
    as in the others.

    Args:
        plan: what runs.
        cut: buckets of a chunk or layer.
    """
    products: PassKind = "W" if plan.split_backward else "B"
    parts: list[tuple[Touch, Touch]] = [
        ((products, chunk), ("F", chunk)) for chunk in range(plan.chunks)
    ]
    if plan.treatment.is_sharded:
        parts += [(("IB", 0), ("IF", 0)), (("T", 0), ("S", 0))]
    share = 1 / (cut * len(parts))
    own = [
        Bucket(frozenset({after}), share, frozenset({before}))
        for after, before in parts
        for _ in range(cut)
    ]
    return [own] * plan.ranks


@dataclass(frozen=True)
class Exchanges:
    """What the ranks of a pipeline exchange with their replicas, and when.

    Attributes:
        replicas: how many there are, and what they exchange.
        link: from a rank to its replica.
        buckets: of every pipeline rank.
        parameters: of every pipeline rank, with the padding of its buckets.
        update: for every pipeline rank, the time in which it updates all that is its own.
        overlap_reduce: reduce a bucket as soon as its gradients are complete; otherwise all after
            the last pass.
        overlap_gather: with a sharded optimizer, let passes run beside gatherings whose parameters
            they do not read; otherwise the first pass comes after all of them.
        gathers_in_step: with a sharded optimizer, update and gather at the end of an iteration, not
            at the beginning of the next, as a step does that may be undone.
    """

    replicas: Replicas
    link: Link
    buckets: Sequence[Sequence[Bucket]]
    parameters: Sequence[float]
    update: Sequence[float]
    overlap_reduce: bool = False
    overlap_gather: bool = False
    gathers_in_step: bool = False

    @property
    def bytes_sent(self) -> float:
        """Bytes that a rank sends to its replicas in an iteration, on the rank that sends most."""
        most = max(self.parameters)
        return self.replicas.reduced_bytes(most) + self.replicas.gathered_bytes(most)

    @property
    def step(self) -> float:
        """Time of the optimizer's step as far as it is not in the program."""
        if not self.replicas.sharded:
            return max(self.update)
        return max(self.update) + self._alone(self._gathering) if self.gathers_in_step else 0.0

    def added_to(self, program: Program, costs: Costs) -> tuple[Program, Costs]:
        """Return a program and its costs with the exchange.

        Args:
            program: of a training iteration, without an exchange.
            costs: of its passes and communications, in the unit of the link.
        """
        program = with_reductions(program, self.buckets, overlap=self.overlap_reduce)
        exchanges = {**costs.exchanges, "RG": self._reduction}
        if not self.replicas.sharded or self.gathers_in_step:
            return program, replace(costs, exchanges=exchanges)
        program = with_updates(program, self.buckets, overlap=self.overlap_gather)
        exchanges["AG"] = self._gathering
        passes = {**costs.passes, "U": self.update}
        return program, replace(costs, passes=passes, exchanges=exchanges)

    def hidden(self, program: Program, costs: Costs) -> Mapping[CommKind, "Hidden"]:
        """Return how much of RG, and of AG with a sharded optimizer, is hidden.

        An iteration is simulated with and without the time of each. Arguments as for ``added_to``.
        """
        program, costs = self.added_to(program, costs)
        whole = simulate(program, costs).end
        found: dict[CommKind, Hidden] = {}
        for kind in costs.exchanges:
            others = {other: own for other, own in costs.exchanges.items() if other != kind}
            without = simulate(program, replace(costs, exchanges=others)).end
            found[kind] = Hidden(self._alone(costs.exchanges[kind]), whole - without)
        if self.replicas.sharded and self.gathers_in_step:
            alone = self._alone(self._gathering)
            found["AG"] = Hidden(alone, alone)
        return found

    @property
    def _reduction(self) -> Exchange:
        return self.replicas.reduction(self.parameters, self.link)

    @property
    def _gathering(self) -> Exchange:
        return self.replicas.gathering(self.parameters, self.link)

    def _alone(self, exchange: Exchange) -> float:
        """Return the time of an exchange on the slowest rank, one bucket after the other."""
        return max(
            time + len(own) * exchange.latency
            for time, own in zip(exchange.times, self.buckets, strict=True)
        )


@dataclass(frozen=True)
class Hidden:
    """How much of an exchange the passes hide.

    Attributes:
        alone: its time on the slowest rank, one bucket after the other.
        added: the time that it adds to an iteration.
    """

    alone: float
    added: float

    @property
    def share(self) -> float:
        """Share of its time that it does not add to the iteration."""
        return 1 - self.added / self.alone if self.alone else 1.0
