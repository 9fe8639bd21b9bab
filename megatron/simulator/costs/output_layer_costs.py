"""Add the output layer's time to the passes that run it under a treatment of the vocabulary.

The layer has three matrix products of equal size: the logits, the input gradient and the weight
gradient (arXiv 2411.05288, section 3). ``time`` is the time of one of them.
"""

from dataclasses import replace
from typing import Final

from megatron.schedules.costs import Costs, Time
from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import Treatment
from megatron.simulator.costs.redistribute import redistribute_stages
from megatron.simulator.costs.stage_costs import Stages

_LAYER_KINDS: Final[tuple[PassKind, ...]] = ("F", "B", "W")


def spread_output_layer(costs: Costs, ranks: int, treatment: Treatment, time: float) -> Costs:
    """Return ``costs`` with the S and T of one of ``ranks`` shards of the vocabulary.

    Args:
        costs: times of the other passes.
        ranks: ranks that share the layer.
        treatment: says which pass computes which of the three products.
        time: time of the whole layer's forward.
    """
    products, share = treatment.products, time / ranks
    return replace(
        costs, passes={**costs.passes, "S": products["S"] * share, "T": products["T"] * share}
    )


def place_output_layer(costs: Costs, stages: Stages, time: float) -> Costs:
    """Return ``costs`` with the whole output layer on the last stage."""
    backward = {"B": 1.0, "W": 1.0} if "W" in costs.passes else {"B": 2.0}
    rank, chunk = stages[-1]
    passes = dict(costs.passes)
    for kind in _LAYER_KINDS:
        if kind in passes:
            table = _table(passes[kind], stages)
            table[rank][chunk] += time * ({"F": 1.0} | backward)[kind]
            passes[kind] = table
    return replace(costs, passes=passes)


def redistribute_layers(
    costs: Costs, stages: Stages, layers: int, output_layer: float, last: int | None = None
) -> Costs:
    """Return the costs with the layers spread so that the slowest rank is as fast as possible.

    The costs include the output layer.

    Args:
        costs: times of an even distribution, one for all ranks and chunks.
        stages: the stages.
        layers: transformer layers of the model.
        output_layer: time of the whole output layer's forward.
        last: layers of the last stage, if the user has chosen their number.

    Raises:
        ValueError: if times differ by rank, because they then belong to a distribution already.
    """
    times: dict[PassKind, float] = {}
    for kind in _LAYER_KINDS:
        time = costs.passes.get(kind, 0.0)
        if not isinstance(time, (int, float)):
            raise ValueError(
                f"{kind} has times by rank, which belong to a distribution of the layers already: "
                "give one time, or leave the layers as they are"
            )
        times[kind] = time * len(stages) / layers
    extra = [0.0] * (len(stages) - 1) + [3 * output_layer]
    counts = redistribute_stages(layers, stages, sum(times.values()), extra, last)
    passes = dict(costs.passes)
    for kind in _LAYER_KINDS:
        if kind in passes:
            table = _table(0.0, stages)
            for (rank, chunk), count in zip(stages, counts, strict=True):
                table[rank][chunk] = count * times[kind]
            passes[kind] = table
    return place_output_layer(replace(costs, passes=passes), stages, output_layer)


def _table(time: Time, stages: Stages) -> list[list[float]]:
    """Return ``time`` as a table by rank and chunk."""
    ranks = 1 + max(rank for rank, _ in stages)
    chunks = 1 + max(chunk for _, chunk in stages)
    rows = [time] * ranks if isinstance(time, (int, float)) else time
    return [[row] * chunks if isinstance(row, (int, float)) else list(row) for row in rows]
