"""Times of passes and communications from the shape of a model and what a device attains."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.schedules.costs import Costs
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.device import UNFUSED, Device, Traffic
from megatron.simulator.costs.redistribute import redistribute, redistribute_stages
from megatron.simulator.costs.shape import ACTIVATION_BYTES, Shape

STATISTICS_BYTES = 12
"""Of a token in the first barrier: maximum, sum of exponentials and target's logit, in fp32."""


@dataclass(frozen=True)
class ModelTimes:
    """Seconds of the parts of a model on a device.

    Attributes:
        shape: the model and one microbatch.
        device: what computes.
        traffic: what its kernels move through memory.
    """

    shape: Shape
    device: Device
    traffic: Traffic = UNFUSED

    def layer(self) -> dict[PassKind, float]:
        """Return the times of one transformer layer: F, B without weight gradients, and W."""
        shape, device, traffic = self.shape, self.device, self.traffic
        recomputed = traffic.layer_forward if shape.kept == "input" else 0.0
        backward = (traffic.layer_backward + recomputed) * shape.elements
        return {
            "F": device.product("forward", shape.forward_flops)
            + device.traffic(traffic.layer_forward * shape.elements),
            "B": device.product("backward", shape.backward_flops) + device.traffic(backward),
            "W": device.product("backward", shape.weight_gradient_flops),
        }

    def whole_output(self) -> dict[PassKind, float]:
        """Return what the whole output layer adds to the passes of the stage that holds it."""
        device, traffic, logits = self.device, self.traffic, self.shape.logits
        product = device.product("output", self.shape.output_product_flops)
        forward = product + device.traffic(traffic.loss_forward * logits)
        backward = product + device.traffic(traffic.loss_backward * logits)
        return {
            "F": forward + self._overhead("S"),
            "B": backward + self._overhead("T"),
            "W": product,
        }

    def whole_input(self) -> dict[PassKind, float]:
        """Return what the whole input layer adds to the passes of the stage that holds it."""
        forward = self.device.traffic(self.traffic.lookup * self.shape.elements)
        gradient = self.device.traffic(self.traffic.gradient * self.shape.vocabulary_parameters)
        return {"F": forward + self._overhead("IF"), "B": 0.0, "W": gradient + self._overhead("IB")}

    def vocabulary_passes(self, shards: int, barriers: int) -> dict[PassKind, float]:
        """Return the times of one shard's passes.

        Args:
            shards: ranks that the vocabulary is split over.
            barriers: as in ``Plan``. With one, S forms the logits and the input gradient and T the
                weight gradient; with more, S forms only the logits.
        """
        device, traffic, logits = self.device, self.traffic, self.shape.logits / shards
        product = device.product("output", self.shape.output_product_flops) / shards
        early = barriers == 1
        in_s = traffic.loss_forward + (traffic.early_gradient if early else 0.0)
        in_t = traffic.loss_backward + traffic.rescale
        gradient = traffic.gradient * self.shape.vocabulary_parameters / shards
        times: dict[PassKind, float] = {
            "S": (2 if early else 1) * product + device.traffic(in_s * logits),
            "E": device.traffic(traffic.rescale * logits),
            "T": (1 if early else 2) * product + device.traffic(in_t * logits),
            "IF": device.traffic(traffic.lookup * self.shape.elements),
            "IB": device.traffic(gradient),
        }
        return {kind: time + self._overhead(kind) for kind, time in times.items()}

    def communications(self, barriers: int | None) -> dict[CommKind, float]:
        """Return the time of every kind of communication; collectives are pipelined over ranks."""
        hop = self.device.message(ACTIVATION_BYTES * self.shape.elements)
        statistics = self.device.message(STATISTICS_BYTES * self.shape.tokens)
        comms: dict[CommKind, float] = {"X": hop, "G": hop}
        if barriers is None:
            return comms
        comms |= {"C0": hop, "CIF": hop, "CIB": hop}
        if barriers == 1:
            return comms | {"C1": statistics + hop}
        comms |= {"C1": statistics, "C2": hop}
        return comms if barriers == 2 else comms | {"C2": statistics, "C3": hop}

    def _overhead(self, kind: PassKind) -> float:
        return self.device.overhead.get(kind, 0.0)


def even_layers(layers: int, stages: int) -> list[int]:
    """Return an even distribution of layers; what does not divide goes to the last stages."""
    return redistribute(layers, stages, 1.0, [0.0] * stages)


def balanced_layers(
    times: ModelTimes, layers: int, stages: Sequence[tuple[int, int]], last: int | None = None
) -> list[int]:
    """Return the layers of every stage for ``redis``: the slowest rank as fast as possible.

    Args:
        times: seconds of the model's parts.
        layers: transformer layers of the model.
        stages: (rank, chunk) of every stage in the order of the data, as in ``Plan``.
        last: layers of the last stage, where the user has decided that.
    """
    extra = [0.0] * len(stages)
    extra[0] += sum(times.whole_input().values())
    extra[-1] += sum(times.whole_output().values())
    return redistribute_stages(layers, stages, sum(times.layer().values()), extra, last)


def model_costs(
    times: ModelTimes,
    stages: Sequence[tuple[int, int]],
    layers: Sequence[int],
    vocabulary: str,
) -> Costs:
    """Return the costs of every pass and communication, in seconds.

    Args:
        times: seconds of the model's parts.
        stages: (rank, chunk) of every stage in the order of the data, as in ``Plan``.
        layers: transformer layers of every stage, in that order.
        vocabulary: a treatment of the vocabulary.

    Raises:
        ValueError: for an unknown treatment, or another number of ``layers`` than of stages.
    """
    if vocabulary not in TREATMENTS:
        raise ValueError(
            f"unknown vocabulary treatment '{vocabulary}': choose one of {', '.join(TREATMENTS)}"
        )
    if len(layers) != len(stages):
        raise ValueError(f"layers are given for {len(layers)} of {len(stages)} stages")
    barriers = TREATMENTS[vocabulary].delay or None
    ranks = 1 + max(rank for rank, _ in stages)
    passes: dict[PassKind, float | list[list[float]]] = {}
    for kind, time in times.layer().items():
        of_stage = [time * count for count in layers]
        if barriers is None:
            of_stage[0] += times.whole_input()[kind]
            of_stage[-1] += times.whole_output()[kind]
        passes[kind] = _by_rank_and_chunk(stages, of_stage, ranks)
    if barriers is not None:
        passes |= times.vocabulary_passes(ranks, barriers)
    return Costs(passes, times.communications(barriers))


def _by_rank_and_chunk(
    stages: Sequence[tuple[int, int]], values: Sequence[float], ranks: int
) -> list[list[float]]:
    table = [[0.0] * (len(stages) // ranks) for _ in range(ranks)]
    for (rank, chunk), value in zip(stages, values, strict=True):
        table[rank][chunk] = value
    return table
