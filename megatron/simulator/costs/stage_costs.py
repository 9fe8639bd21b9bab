"""What the stages of a plan cost, for any distribution of the layers.

A stage costs as much as its transformer layers, and what it does besides: the whole vocabulary
layers, where they are not split over the ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.schedules.costs import Costs, Time
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import CHUNKED_KINDS, PassKind
from megatron.schedules.treatments import Treatment
from megatron.simulator.costs.device import FUSED, NOTIONAL
from megatron.simulator.costs.from_model import ModelTimes
from megatron.simulator.costs.redistribute import redistribute, redistribute_stages
from megatron.simulator.costs.shape import Shape

Stages = Sequence[tuple[int, int]]
"""(rank, chunk) of every stage, in the order in which the data flows, as in ``Plan``."""


@dataclass(frozen=True)
class StageCosts:
    """What every stage costs, whatever layers it has.

    Attributes:
        stages: the stages.
        layer: what one transformer layer adds to F, B (the input gradient) and W of its stage.
        extras: what these cost besides, by stage.
        others: the passes that do not belong to a stage.
        treatment: of the vocabulary, to which they belong.
        comms: communications; absent ones are free.
    """

    stages: Stages
    layer: Mapping[PassKind, float]
    extras: Sequence[Mapping[PassKind, float]]
    others: Mapping[PassKind, Time]
    treatment: Treatment
    comms: Mapping[CommKind, float] = field(default_factory=dict)

    def costs(self, layers: Sequence[int]) -> Costs:
        """Return the costs of all passes, those of stages by rank and chunk.

        Args:
            layers: transformer layers of every stage.

        Raises:
            ValueError: for another number of ``layers`` than of stages.
        """
        if len(layers) != len(self.stages):
            raise ValueError(f"layers are given for {len(layers)} of {len(self.stages)} stages")
        ranks = 1 + max(rank for rank, _ in self.stages)
        passes: dict[PassKind, Time] = {}
        for kind, cost in self.layer.items():
            table = [[0.0] * (len(self.stages) // ranks) for _ in range(ranks)]
            for (rank, chunk), count, extra in zip(self.stages, layers, self.extras, strict=True):
                table[rank][chunk] = max(cost * count + extra.get(kind, 0.0), 0.0)
            passes[kind] = table
        return Costs({**passes, **self.others}, self.comms)

    def balanced(self, layers: int, last: int | None = None) -> tuple[int, ...]:
        """Return the layers of every stage for ``redis``.

        The slowest rank is as fast as possible, and then its slowest stage.

        Args:
            layers: transformer layers of the model.
            last: layers of the last stage, where the user has decided that.

        Raises:
            ValueError: if the last stage cannot have that many.
        """
        extras = [sum(extra.values()) for extra in self.extras]
        least = min(*extras, 0.0)  # measured ones may be below what the mean layer makes them
        extras = [extra - least for extra in extras]
        layer = sum(self.layer.values())
        return tuple(redistribute_stages(layers, self.stages, layer, extras, last))


def stage_costs(times: ModelTimes, stages: Stages, treatment: Treatment) -> StageCosts:
    """Return what stages cost on the device of ``times``, in its seconds.

    Args:
        times: of the model's parts.
        stages: the stages of the plan.
        treatment: what becomes of the vocabulary layers.
    """
    extras: list[dict[PassKind, float]] = [dict.fromkeys(CHUNKED_KINDS, 0.0) for _ in stages]
    others: dict[PassKind, float] = {}
    if treatment.is_sharded:
        others = times.vocabulary_passes(1 + max(rank for rank, _ in stages), treatment)
    else:
        for extra, whole in ((extras[0], times.whole_input()), (extras[-1], times.whole_output())):
            for kind, time in whole.items():
                extra[kind] += time
    comms = times.communications(treatment)
    return StageCosts(stages, times.layer(), extras, others, treatment, comms)


def notional_costs(shape: Shape, stages: Stages, treatment: Treatment) -> StageCosts:
    """Return the costs by which passes are placed until they have been measured: their FLOPs.

    Args:
        shape: the model and one microbatch.
        stages: the stages of the plan.
        treatment: what becomes of the vocabulary layers.
    """
    return stage_costs(ModelTimes(shape, NOTIONAL, FUSED, early_whole=True), stages, treatment)


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return an even distribution of layers; what does not divide goes to the last stages."""
    return tuple(redistribute(layers, stages, 1.0, [0.0] * stages))
