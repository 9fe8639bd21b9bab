"""Costs of the stages of a plan, for any distribution of the layers.

A stage costs as much as its transformer layers and its extra work together. Extra work is that of
the vocabulary layers, where they are whole, and of the layers that predict further tokens, on the
last stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean

from megatron.schedules.costs import Costs, Exchange, HopTime, Time
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import Treatment
from megatron.simulator.costs.redistribute import redistribute, redistribute_stages

Stages = Sequence[tuple[int, int]]
"""(rank, chunk) of every stage, in the order in which the data flows, as in ``Plan``."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of one layer and of all other work, from which any distribution has its costs.

    Attributes:
        stages: the stages.
        layer: time that one transformer layer adds to F, R, B (the input gradient) and W of a
            stage; R is absent where nothing is computed again.
        weights: time of every layer of the model as a share of ``layer``, by kind of pass; kinds in
            which all layers are alike are absent.
        extras: for every stage, the time of its extra work in F, B and W.
        others: times of the vocabulary passes, which belong to no stage.
        treatment: the treatment of the vocabulary that these passes belong to.
        comms: times of communications; absent kinds are free.
        exchanges: times of the communication with replicas, as in ``Costs``.
    """

    stages: Stages
    layer: Mapping[PassKind, float]
    extras: Sequence[Mapping[PassKind, float]]
    others: Mapping[PassKind, Time]
    treatment: Treatment
    comms: Mapping[CommKind, HopTime] = field(default_factory=dict)
    exchanges: Mapping[CommKind, Exchange] = field(default_factory=dict)
    weights: Mapping[PassKind, Sequence[float]] = field(default_factory=dict)

    def costs(self, layers: Sequence[int]) -> Costs:
        """Return the costs of all passes; those of F, R, B and W are by rank and chunk.

        Raises:
            ValueError: if ``layers`` does not have one number per stage.
        """
        if len(layers) != len(self.stages):
            raise ValueError(f"layers are given for {len(layers)} of {len(self.stages)} stages")
        times: dict[PassKind, list[float]] = {
            kind: [
                max(cost * count + extra.get(kind, 0.0), 0.0)
                for count, extra in zip(self.weighed(kind, layers), self.extras, strict=True)
            ]
            for kind, cost in self.layer.items()
        }
        passes = {kind: self._by_rank(own) for kind, own in times.items()}
        return Costs({**passes, **self.others}, self.comms, self.exchanges)

    def _by_rank(self, times: Sequence[float]) -> Time:
        """Return the times of all stages as a table by rank and chunk."""
        ranks = 1 + max(rank for rank, _ in self.stages)
        table = [[0.0] * (len(self.stages) // ranks) for _ in range(ranks)]
        for (rank, chunk), time in zip(self.stages, times, strict=True):
            table[rank][chunk] = time
        return table

    def weighed(self, kind: PassKind, layers: Sequence[float]) -> Sequence[float]:
        """Return how many layers of the time ``layer`` every stage is worth in passes of a kind."""
        weights = self.weights.get(kind)
        if weights is None:
            return layers
        ends = list(accumulate(map(int, layers)))
        starts = [0, *ends[:-1]]
        assert ends[-1] == len(weights), (layers, len(weights))
        return [sum(weights[start:end]) for start, end in zip(starts, ends, strict=True)]

    def balanced(self, layers: int, last: int | None = None) -> tuple[int, ...]:
        """Return the layers of every stage for ``redis``.

        The slowest rank is as fast as possible, and then its slowest stage. Layers that differ
        count with their mean. ``last``: layers of the last stage, if the user has chosen.

        Raises:
            ValueError: if the last stage cannot have ``last`` layers.
        """
        extras = [sum(extra.values()) for extra in self.extras]
        least = min(*extras, 0.0)  # measured extras may be negative, if a stage's layers are fast
        extras = [extra - least for extra in extras]
        layer = sum(time * fmean(self.weights.get(kind, (1,))) for kind, time in self.layer.items())
        return tuple(redistribute_stages(layers, self.stages, layer, extras, last))


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return an even distribution; what does not divide goes to the last stages, a layer each."""
    return tuple(redistribute(layers, stages, 1.0, [0.0] * stages))
