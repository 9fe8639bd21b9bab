"""Costs of the stages of a plan, for any distribution of the layers.

A stage costs as much as its transformer layers and its extra work together. Extra work is the work
of vocabulary layers that are not split, and, on the last stage, of the layers that predict further
tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from megatron.schedules.costs import Costs, Exchange, HopTime, Time
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import Treatment
from megatron.simulator.costs.redistribute import redistribute, redistribute_stages
from megatron.simulator.costs.unequal_layers import spread_unequal

Stages = Sequence[tuple[int, int]]
"""(rank, chunk) of every stage, in the order in which the data flows, as in ``Plan``."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of one layer and of all other work, from which the costs of any stages follow.

    Attributes:
        stages: the stages.
        layer: time that one transformer layer adds to F, R, B (the input gradient) and W of a
            stage; R is absent if nothing is computed again.
        weights: by kind of pass, the time of every layer of the model as a multiple of ``layer``;
            kinds of passes in which all layers take equal time are absent.
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
        """Return the costs of all passes; F, R, B and W have a table by rank and chunk.

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
        """Return the time of every stage's layers in a kind of pass, as a multiple of ``layer``."""
        weights = self.weights.get(kind)
        if weights is None:
            return layers
        ends = list(accumulate(map(int, layers)))
        starts = [0, *ends[:-1]]
        assert ends[-1] == len(weights), (layers, len(weights))
        return [sum(weights[start:end]) for start, end in zip(starts, ends, strict=True)]

    def balanced(self, layers: int, last: int | None = None) -> tuple[int, ...]:
        """Return the layers of every stage for ``redis``.

        The slowest rank is as fast as possible, and then its slowest stage. ``last`` is the number
        of layers of the last stage, if the user has chosen it.

        Raises:
            ValueError: if the last stage cannot have ``last`` layers.
        """
        extras = [sum(extra.values()) for extra in self.extras]
        least = min(*extras, 0.0)  # measured extras may be negative, if a stage's layers are fast
        extras = [extra - least for extra in extras]
        if self.weights:
            return tuple(spread_unequal(self.of_layers(layers), self.stages, extras, last))
        layer = sum(self.layer.values())
        return tuple(redistribute_stages(layers, self.stages, layer, extras, last))

    def alike(self, layers: int, further: int = 0) -> tuple[int, ...]:
        """Return layers of every stage such that the slowest rank's layers take the least time.

        Vocabulary layers do not count.

        Args:
            layers: layers of the model.
            further: layers on the last stage that predict further tokens; each counts as much as
                the last layer.
        """
        times = self.of_layers(layers)
        extras = [0.0] * (len(self.stages) - 1) + [further * times[-1]]
        return tuple(spread_unequal(times, self.stages, extras))

    def of_layers(self, layers: int) -> list[float]:
        """Return the time of every layer of the model in all its passes together."""
        equal = [1.0] * layers
        weights = [(time, self.weights.get(kind, equal)) for kind, time in self.layer.items()]
        return [sum(time * own[layer] for time, own in weights) for layer in range(layers)]


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return an even distribution; layers left over go to the last stages, one each."""
    return tuple(redistribute(layers, stages, 1.0, [0.0] * stages))
