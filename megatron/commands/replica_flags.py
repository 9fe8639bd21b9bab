"""The flags of the commands on replicas of a pipeline, and what follows from them."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from megatron.commands.arguments import number
from megatron.schedules.costs import Costs, Exchange
from megatron.schedules.needs import REPLICA_KINDS, CommKind
from megatron.simulator.costs.collective_time import Path
from megatron.simulator.costs.replicas import Replicas
from megatron.simulator.exchange import EvenBuckets, Overlap

OVERLAP_FIELDS: Final = (
    "overlap_grad_reduce",
    "use_distributed_optimizer",
    "overlap_param_gather",
)
"""What the flags of ``add_overlap_flags`` give."""


def add_overlap_flags(add: Callable[..., object]) -> None:
    """Add the flags that say what replicas do together; they have the names of training.

    Args:
        add: ``add_argument`` of a parser or of a group in it.
    """
    for name, meaning in zip(
        OVERLAP_FIELDS,
        (
            "reduce gradients (RG) beside passes; otherwise after the last one",
            "replicas update (U) a part of the parameters each, and gather the others (AG)",
            "gather beside passes that do not read the parameters; otherwise before the first one",
        ),
        strict=True,
    ):
        add("--" + name.replace("_", "-"), action="store_true", help=meaning)


def overlap_of(arguments: argparse.Namespace) -> Overlap:
    """Return what those flags say."""
    return Overlap(
        reduce=arguments.overlap_grad_reduce,
        updates=arguments.use_distributed_optimizer,
        gather=arguments.overlap_param_gather,
    )


def add_replica_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of replicas; ``read_buckets`` and ``with_exchange`` read them."""
    add = parser.add_argument_group("replicas").add_argument
    add("--replicas", type=number(1), default=1, metavar="D", help="pipelines (default: 1)")
    add_overlap_flags(add)
    cut = "of each chunk, and of each vocabulary layer that is split (default: 1)"
    add("--buckets", type=number(1), metavar="N", help=cut)
    add("--parameters", type=number(1, float), metavar="N", help="of a rank")
    bandwidth = "bytes that a rank can send to its replica in a unit of time"
    add("--replica-bandwidth", type=number(0, float), metavar="BYTES", help=bandwidth)
    latency = "time of a step to it in addition to that of its bytes (default: 0)"
    add("--replica-latency", type=number(0, float), metavar="TIME", help=latency)


LINK_FIELDS: Final = ("parameters", "replica_bandwidth", "replica_latency")
"""What the time of RG and AG follows from, if the costs do not have it."""


def read_buckets(arguments: argparse.Namespace) -> EvenBuckets | None:
    """Return the buckets of every rank; ``None`` without replicas.

    Raises:
        ValueError: if flags of replicas are given and there is one replica.
    """
    if arguments.replicas > 1:
        return EvenBuckets(overlap_of(arguments), arguments.buckets or 1)
    for field in (*OVERLAP_FIELDS, "buckets", *LINK_FIELDS):
        if getattr(arguments, field):
            flag = "--" + field.replace("_", "-")
            raise ValueError(f"{flag} is about replicas: add --replicas D, or leave it out")
    return None


def with_exchange(costs: Costs, arguments: argparse.Namespace, ranks: int) -> Costs:
    """Return ``costs`` with the time of RG and AG, if the flags give the link.

    Args:
        costs: as given.
        arguments: the flags.
        ranks: pipeline ranks.

    Raises:
        ValueError: if the time of RG is given twice, or not at all.
    """
    if arguments.replicas == 1:
        return costs
    given = {*costs.comms, *costs.exchanges}.intersection(REPLICA_KINDS)
    if arguments.parameters and arguments.replica_bandwidth and not given:
        link = Path(arguments.replica_bandwidth, arguments.replica_latency or 0.0)
        replicas = Replicas(arguments.replicas, sharded=arguments.use_distributed_optimizer)
        parameters = [arguments.parameters] * ranks
        exchanges: dict[CommKind, Exchange] = {"RG": replicas.reduction(parameters, link)}
        if replicas.sharded:
            exchanges["AG"] = replicas.gathering(parameters, link)
        return replace(costs, exchanges=exchanges)
    link_given = any(getattr(arguments, field) is not None for field in LINK_FIELDS)
    if link_given == bool(given):
        raise ValueError(
            f"--replicas {arguments.replicas}: give the time of RG as a cost (RG=3), or "
            "--parameters and --replica-bandwidth"
        )
    if link_given:
        raise ValueError(
            "the link between replicas needs both --parameters and --replica-bandwidth, above 0"
        )
    return costs
