"""Costs of a job with another treatment of the vocabulary, from the measured costs of a job.

If the job has split its vocabulary, S and T of all ranks are together the work of a whole output
layer, and F and B of a stage are layers only. If the job has not, the last stage takes longer than
its layers alone, by the output layer. So each of both jobs tells what the other one would cost. The
collectives of a split vocabulary are missing where the job has not run them.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron.schedules.costs import Time
from megatron.schedules.needs import STAGE_KINDS
from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import TREATMENTS, Treatment
from megatron.simulator.costs.output_layer_costs import whole_layer
from megatron.simulator.costs.stage_costs import StageCosts


def output_layer_time(known: StageCosts) -> float:
    """Return the time of the whole output layer for one microbatch, forward and backward.

    ``known`` are measured costs. If the vocabulary is split, the time is that of the output layer's
    passes, added over the ranks; otherwise it is the extra time of the last stage.

    Raises:
        ValueError: the last stage is no slower than its layers, so nothing was measured.
    """
    if known.treatment.is_sharded:
        return sum(
            sum(_of_ranks(known.others[kind], _ranks(known)))
            for kind in known.treatment.output_passes
        )
    time = sum(known.extras[-1].values())
    if time <= 0:
        raise ValueError(
            "the last stage takes no longer than its layers, so the time of its output layer is "
            "not known"
        )
    return time


def on_the_ends(known: StageCosts, *, recompute: bool = False) -> StageCosts:
    """Return the costs of the job whose first and last stage hold the whole vocabulary layers.

    The last stage gets the output layer. The first stage gets one rank's IF and IB: each rank looks
    up all tokens of a microbatch.

    Args:
        known: measured costs of a job with a split vocabulary.
        recompute: whether the output layer's backward computes the logits again.
    """
    ranks, kinds = _ranks(known), known.layer.keys()
    shares = whole_layer(kinds, 1.0, recompute)
    product = output_layer_time(known) / sum(shares.values())
    extras = [dict(extra) for extra in known.extras]
    lookup: dict[PassKind, PassKind] = {"F": "IF", "B": "IB"}
    for kind, own in lookup.items():
        times = _of_ranks(known.others[own], ranks)
        extras[0][kind] = extras[0].get(kind, 0.0) + sum(times) / ranks
    for kind, products in shares.items():
        extras[-1][kind] = extras[-1].get(kind, 0.0) + products * product
    return replace(
        known,
        extras=extras,
        others=_updates(known),
        treatment=TREATMENTS["none"],
        comms={kind: time for kind, time in known.comms.items() if kind in STAGE_KINDS},
    )


def spread_over_ranks(
    known: StageCosts, treatment: Treatment, *, recompute: bool = False
) -> StageCosts:
    """Return the costs of the job that splits its vocabulary over all ranks; its lookups are free.

    The stages keep their layers only. Every rank gets an equal part of the output layer, and its
    collectives take no time, because the job has not measured any.

    Args:
        known: measured costs of a job with whole vocabulary layers.
        treatment: of the other job.
        recompute: whether the output layer's backward computes the logits again.

    Raises:
        ValueError: the time of the output layer is not known.
    """
    kinds = treatment.output_passes
    products = {kind: treatment.products_of(kind, recompute=recompute) for kind in kinds}
    share = output_layer_time(known) / _ranks(known) / sum(products.values())
    others = {kind: products.get(kind, 0) * share for kind in treatment.passes}
    return replace(
        known,
        extras=[{} for _ in known.stages],
        others={**others, **_updates(known)},
        treatment=treatment,
    )


def _updates(known: StageCosts) -> dict[PassKind, Time]:
    """Return the time of U, which belongs to no treatment."""
    return {kind: time for kind, time in known.others.items() if kind == "U"}


def _ranks(known: StageCosts) -> int:
    return 1 + max(rank for rank, _ in known.stages)


def _of_ranks(time: Time, ranks: int) -> Iterator[float]:
    """Yield the time of every rank."""
    for rank in range(ranks):
        own = time if isinstance(time, (int, float)) else time[rank]
        assert isinstance(own, (int, float)), "passes of the vocabulary have no chunks"
        yield own
