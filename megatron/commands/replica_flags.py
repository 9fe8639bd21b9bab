"""The commands' flags on replicas of a pipeline, and the costs and buckets that they make."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from megatron.flags.declare import flag, option_of
from megatron.flags.groups import Flags
from megatron.flags.ranges import COUNT, NOT_NEGATIVE, Range, up_to
from megatron.schedules.costs import Costs, Exchange
from megatron.schedules.needs import REPLICA_KINDS, CommKind
from megatron.simulator.costs.collective_time import Path
from megatron.simulator.costs.replicas import Replicas
from megatron.simulator.exchange import EvenBuckets, Overlap


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class OverlapFlags:
    """What replicas do together, as in training."""

    overlap_grad_reduce: bool = flag(False,
        "Reduce gradients (RG) while passes run; otherwise after the last one.")
    use_distributed_optimizer: bool = flag(False,
        "Replicas update (U) a part of the parameters each, and gather the others (AG).")
    overlap_param_gather: bool = flag(False,
        "Gather while passes run that do not read the parameters; else before the first one.")

    @property
    def overlap(self) -> Overlap:
        """The part of the replicas' work that overlaps with passes."""
        return Overlap(
            reduce=self.overlap_grad_reduce,
            updates=self.use_distributed_optimizer,
            gather=self.overlap_param_gather,
        )


@dataclass(frozen=True)
class ReplicaFlags(OverlapFlags):
    """Replicas."""

    replicas: int = flag(1, "Pipelines.", COUNT, metavar="D")
    buckets: int | None = flag(None,
        "Of each chunk, and of each vocabulary layer that is split.", COUNT, unset="1")
    parameters: float | None = flag(None, "Of a rank.", up_to(10**12), unset="by the costs")
    replica_bandwidth: float | None = flag(None,
        "Bytes that a rank can send to its replica in a unit of time.", Range(0, 1e15),
        unset="by the costs")
    replica_latency: float | None = flag(None,
        "Time of a step to it in addition to that of its bytes.", NOT_NEGATIVE, unset="0")
# fmt: on

    @property
    def link_is_given(self) -> bool:
        """Whether the flags describe the link from which the times of RG and AG follow.

        RG reduces gradients over the replicas, AG gathers updated parameters.
        """
        link = (self.parameters, self.replica_bandwidth, self.replica_latency)
        return any(value is not None for value in link)

    @property
    def cut(self) -> EvenBuckets | None:
        """The buckets of every rank; ``None`` without replicas."""
        return EvenBuckets(self.overlap, self.buckets or 1) if self.replicas > 1 else None


def about_replicas(flags: Flags) -> Iterator[str]:
    """Yield a message for each flag about replicas, which needs more than one replica."""
    own = flags[ReplicaFlags]
    for field in fields(ReplicaFlags) if own.replicas == 1 else ():
        if field.name != "replicas" and getattr(own, field.name):
            yield f"{option_of(field.name)} is about replicas: add --replicas D, or leave it out"


def with_exchange(costs: Costs, flags: ReplicaFlags, ranks: int) -> Costs:
    """Return ``costs`` with the times of RG and AG, if the flags describe the link.

    Args:
        costs: as given.
        flags: flags on replicas.
        ranks: pipeline ranks.

    Raises:
        ValueError: if the time of RG is given both as a cost and by a link, or not at all.
    """
    if flags.replicas == 1:
        return costs
    given = {*costs.comms, *costs.exchanges}.intersection(REPLICA_KINDS)
    if flags.parameters and flags.replica_bandwidth and not given:
        link = Path(flags.replica_bandwidth, flags.replica_latency or 0.0)
        replicas = Replicas(flags.replicas, sharded=flags.use_distributed_optimizer)
        parameters = [flags.parameters] * ranks
        exchanges: dict[CommKind, Exchange] = {"RG": replicas.reduction(parameters, link)}
        if replicas.sharded:
            exchanges["AG"] = replicas.gathering(parameters, link)
        return replace(costs, exchanges=exchanges)
    if flags.link_is_given == bool(given):
        raise ValueError(
            f"--replicas {flags.replicas}: give the time of RG as a cost (RG=3), or "
            "--parameters and --replica-bandwidth"
        )
    if flags.link_is_given:
        raise ValueError(
            "the link between replicas needs both --parameters and --replica-bandwidth, above 0"
        )
    return costs
