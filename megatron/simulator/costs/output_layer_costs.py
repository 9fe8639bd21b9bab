"""Add the output layer's time to the passes that run it under a treatment of the vocabulary.

The layer has three matrix products of equal size: the logits, the input gradient and the weight
gradient (arXiv 2411.05288, section 3). ``time`` is the time of one product. With ``recompute`` the
logits are not kept; they are computed once more before the weight gradient.
"""

from collections.abc import Container
from dataclasses import replace

from megatron.schedules.costs import Costs, Time
from megatron.schedules.passes import CHUNKED_KINDS, PassKind
from megatron.schedules.treatments import TREATMENTS, Treatment
from megatron.simulator.costs.stage_costs import StageCosts, Stages


def spread_output_layer(
    costs: Costs, ranks: int, treatment: Treatment, time: float, *, recompute: bool = False
) -> Costs:
    """Return ``costs`` with the times of S and T for a vocabulary split into ``ranks`` shards."""
    kinds: tuple[PassKind, ...] = ("S", "T")
    share = time / ranks
    own = {kind: treatment.products_of(kind, recompute=recompute) * share for kind in kinds}
    return replace(costs, passes={**costs.passes, **own})


def place_output_layer(
    costs: Costs, stages: Stages, time: float, *, recompute: bool = False
) -> Costs:
    """Return ``costs`` with the whole output layer on the last stage."""
    rank, chunk = stages[-1]
    passes = dict(costs.passes)
    for kind, extra in whole_layer(costs.passes, time, recompute).items():
        table = _table(passes[kind], stages)
        table[rank][chunk] += extra
        passes[kind] = table
    return replace(costs, passes=passes)


def redistribute_layers(
    costs: Costs,
    stages: Stages,
    layers: int,
    output_layer: float,
    last: int | None = None,
    *,
    recompute: bool = False,
) -> Costs:
    """Return the costs with the layers spread so that the slowest rank is as fast as possible.

    ``costs`` are the costs of an even distribution, with one time for all ranks and chunks, and
    without the output layer. The result includes the output layer. ``last`` is the number of layers
    of the last stage, if a user has chosen it.

    Raises:
        ValueError: if times differ by rank, because such times already belong to a distribution.
    """
    extras = [*({} for _ in stages[1:]), whole_layer(costs.passes, output_layer, recompute)]
    kinds = [kind for kind in CHUNKED_KINDS if kind in costs.passes]
    layer = {kind: _one_time(costs, kind) * len(stages) / layers for kind in kinds}
    others = {kind: time for kind, time in costs.passes.items() if kind not in layer}
    spread = StageCosts(
        stages, layer, extras, others, TREATMENTS["redis"], costs.comms, costs.exchanges
    )
    return spread.costs(spread.balanced(layers, last))


def whole_layer(kinds: Container[PassKind], time: float, recompute: bool) -> dict[PassKind, float]:
    """Return the time that a whole output layer adds to passes of its stage, by kind.

    Args:
        kinds: the kinds of passes that the stage has; without W, the backward is one pass.
        time: time of one of the layer's products.
        recompute: whether the logits are computed again before the weight gradient.
    """
    weights = 2 * time if recompute else time
    backward = time if "W" in kinds else time + weights
    added: dict[PassKind, float] = {"F": time, "B": backward, "W": weights}
    return {kind: extra for kind, extra in added.items() if kind in kinds}


def _one_time(costs: Costs, kind: PassKind) -> float:
    time = costs.passes[kind]
    if not isinstance(time, (int, float)):
        raise ValueError(
            f"{kind} has times by rank, which belong to a distribution of the layers already: "
            "give one time, or leave the layers as they are"
        )
    return time


def _table(time: Time, stages: Stages) -> list[list[float]]:
    """Return ``time`` as a table by rank and chunk."""
    ranks = 1 + max(rank for rank, _ in stages)
    chunks = 1 + max(chunk for _, chunk in stages)
    rows = [time] * ranks if isinstance(time, (int, float)) else time
    return [[row] * chunks if isinstance(row, (int, float)) else list(row) for row in rows]
