"""Times of a model's parts, from the model's shape and the rates of a device.

``stage_costs.py`` adds these times up for the stages of a plan: on the notional device to place
passes, and on a GPU to predict the time of a run. There is no other model of time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from megatron.schedules.costs import HopTime
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import CHUNKED_KINDS, PassKind
from megatron.schedules.treatments import FP32_OF_A_TOKEN, Payload, Treatment
from megatron.simulator.costs.device import UNFUSED, Device, Traffic
from megatron.simulator.costs.machines import ONE_MACHINE, Machines
from megatron.simulator.costs.recomputed import Repeated
from megatron.simulator.costs.shape import ACTIVATION_BYTES, Shape

CORE_TRAFFIC: Final = 8 / 46
NORMS_TRAFFIC: Final = 8 / 46
MLP_TRAFFIC: Final = 16 / 46
"""Shares that the parts of a layer have in the traffic of its forward, as ``UNFUSED`` counts it."""

JOINING_FORWARD: Final = 20 / 46
JOINING_BACKWARD: Final = 18 / 62
"""The same for what a further token that is predicted adds to its layer: three norms (4 bytes
forward, 6 backward), and two activations that are copied next to each other (8)."""


@dataclass(frozen=True)
class ModelTimes:
    """Seconds of the parts of a model on a device.

    Attributes:
        shape: the model and one microbatch.
        device: the device that runs them.
        traffic: memory traffic of its kernels.
        early_whole: whether a whole output layer computes its input gradient in F, right after the
            logits, as ours does; else in B, as Megatron-LM does.
        split_backward: whether W is a pass of its own.
        machines: in which the ranks are.
    """

    shape: Shape
    device: Device
    traffic: Traffic = UNFUSED
    early_whole: bool = False
    split_backward: bool = True
    machines: Machines = ONE_MACHINE

    def layer(self) -> dict[PassKind, float]:
        """Return the times of one transformer layer: F, B without weight gradients, and W.

        B has the parts of a layer that it computes again; for whole layers see ``repeated``.

        Attention itself has no weights, so its whole backward is in B. Where ranks share the layer,
        activations enter and leave attention and MLP once each in F and in B, in four rounds of a
        ring (arXiv 2205.05198, section 4.2.2). F waits for all of them.
        """
        shape, device, traffic = self.shape, self.device, self.traffic
        backward = self._layer_traffic(traffic.layer_backward, traffic.outside_backward)
        backward += self._repeated_parts()
        product = device.product("backward", shape.weight_gradient_flops)
        waiting, weights = self._backward_rounds(product)
        return {
            "F": device.product("forward", shape.forward_flops) + self._around_forward(),
            "B": device.product("backward", shape.backward_flops + shape.repeated_flops)
            + backward
            + waiting,
            "W": weights,
        }

    def repeated(self) -> Repeated:
        """Return the time that layers which are computed again whole take, in R or in B."""
        shape, device = self.shape, self.device
        return Repeated(
            shape.recomputed,
            device.product("backward", shape.forward_flops) + self._around_forward(),
            device.product("backward", shape.spared_flops),
            [device.product("backward", shape.hidden_flops(window)) for window in shape.windows],
        )

    def further_tokens(self, treatment: Treatment) -> dict[PassKind, float]:
        """Return what further tokens that are predicted add to each pass of the last stage.

        Each has a layer like the last one of the model, and a product before it, whose input the
        tensor ranks gather if they have parts of it, and whose outputs they put together. If the
        vocabulary is not split, the stage looks the tokens' embeddings up itself.

        Args:
            treatment: how the vocabulary layers are run.
        """
        shape, device, traffic = self.shape, self.device, self.traffic
        added: dict[PassKind, float] = dict.fromkeys(CHUNKED_KINDS, 0.0)
        if not shape.depths:
            return added
        if not treatment.is_sharded:
            added = self.whole_input()
        split_sequence = shape.tensor.sequence_parallel
        forward, backward = JOINING_FORWARD * traffic.layer_forward, traffic.layer_backward
        backward *= JOINING_BACKWARD
        joining: dict[PassKind, float] = {
            "F": device.product("forward", shape.joining_flops)
            + self._layer_traffic(forward, forward)
            + (3 if split_sequence else 1) * self._round(),
            "B": device.product("backward", shape.joining_flops)
            + self._layer_traffic(backward, backward)
            + (3 if split_sequence else 4) * self._round(),
            "W": device.product("backward", shape.joining_flops)
            + (2 * self._round() if split_sequence and self.split_backward else 0.0),
        }
        hidden = shape.hidden_flops(shape.last_window)
        again = 2 + shape.recomputed.core
        less: dict[PassKind, float] = {
            "F": device.product("forward", hidden),
            "B": device.product("backward", again * hidden),
        }
        if shape.repeats_depths:
            repeated = device.product("backward", shape.depth_repeated_flops)
            joining["B"] += repeated + self._around_forward()
        for kind, layer in self.layer().items():
            added[kind] += shape.depths * (layer + joining[kind] - less.get(kind, 0.0))
        return added

    def _around_forward(self) -> float:
        """Return the time of a layer's F beside its products."""
        traffic = self.traffic
        moved = self._layer_traffic(traffic.layer_forward, traffic.outside_forward)
        return moved + 4 * self._round()

    def _repeated_parts(self) -> float:
        """Return the time beside products of the parts of a layer that B computes again.

        An MLP gathers its input again if that is a part of the sequence.
        """
        again, forward = self.shape.recomputed, self.traffic.layer_forward
        outside = NORMS_TRAFFIC * again.norms * forward
        within = (CORE_TRAFFIC * again.core + MLP_TRAFFIC * again.mlp) * forward
        gathers = again.mlp and self.shape.tensor.sequence_parallel
        return self._layer_traffic(within + outside, outside) + gathers * self._round()

    def _backward_rounds(self, product: float) -> tuple[float, float]:
        """Return what B of a layer waits for rounds, and the time of W, given that of its product.

        A W that is a pass of its own gathers both factors of each product again if they are parts
        of the sequence. Otherwise what enters and leaves in B moves beside W's products, except for
        the gradients of the layer's outputs, which are gathered before them.
        """
        split_sequence = self.shape.tensor.sequence_parallel
        if self.split_backward:
            return 4 * self._round(), product + (4 * self._round() if split_sequence else 0.0)
        beside = (2 if split_sequence else 4) * self._round()
        return (2 * self._round() if split_sequence else 0.0), max(product, beside)

    def _layer_traffic(self, all_of_it: float, outside: float) -> float:
        """Return the time of elementwise kernels, given their bytes per element of a layer.

        Args:
            all_of_it: bytes.
            outside: of them those outside of attention and MLP.
        """
        tensor = self.shape.tensor
        of_a_rank = (all_of_it - outside) / tensor.ranks + outside / tensor.sequence_parts
        return self.device.traffic(of_a_rank * self.shape.elements)

    def _round(self, elements: int | None = None) -> float:
        """Return the time in which the tensor ranks gather, or scatter, an activation.

        Args:
            elements: of the activation; ``None``: of one between two layers.
        """
        shape = self.shape
        size = ACTIVATION_BYTES * (shape.elements if elements is None else elements)
        return self.machines.across(self.device).round(size, shape.tensor.ranks)

    def whole_output(self) -> dict[PassKind, float]:
        """Return the time that an output layer on the last stage adds to each pass of it.

        The tensor ranks share it: they gather its input if they have parts of it, and its gradient
        leaves it as it leaves a layer.
        """
        shape, device, traffic, tensor = self.shape, self.device, self.traffic, self.shape.tensor
        logits = shape.logits / tensor.ranks
        product = device.product("output", shape.output_product_flops) / tensor.ranks
        all_rounds = self._round(shape.output_elements)
        entering = all_rounds if tensor.sequence_parallel else 0.0
        leaving = all_rounds if tensor.sequence_parallel else 2 * all_rounds
        forward = product + device.traffic(traffic.loss_forward * logits) + self._overhead("S")
        forward += entering + self._statistics("statistics")
        loss = device.traffic(traffic.loss_backward * logits)
        if shape.vocab_recompute:
            loss += product + device.traffic(traffic.loss_forward * logits)
        if self.early_whole:
            early = product + device.traffic(traffic.early_gradient * logits) + leaving
            return {"F": forward + early, "B": 0.0, "W": product + loss + self._overhead("T")}
        return {"F": forward, "B": product + loss + leaving + self._overhead("T"), "W": product}

    def whole_input(self) -> dict[PassKind, float]:
        """Return the time that an input layer on the first stage adds to each pass of it.

        The tensor ranks share it, and add up what they have looked up.
        """
        shape, device, traffic, tensor = self.shape, self.device, self.traffic, self.shape.tensor
        entering = self._round() if tensor.sequence_parallel else 0.0
        leaving = self._round() if tensor.sequence_parallel else 2 * self._round()
        parameters = shape.vocabulary_parameters / tensor.ranks
        return {
            "F": device.traffic(traffic.lookup * shape.elements) + self._overhead("IF") + leaving,
            "B": device.traffic(traffic.scatter * shape.elements) + entering,
            "W": device.traffic(traffic.gradient * parameters) + self._overhead("IB"),
        }

    def vocabulary_passes(self, shards: int, treatment: Treatment) -> dict[PassKind, float]:
        """Return the times of one shard's passes.

        Args:
            shards: ranks that the vocabulary is split over.
            treatment: says which passes there are, and which products each of them computes.
        """
        shape, device, traffic = self.shape, self.device, self.traffic
        logits = shape.logits / shards
        product = device.product("output", shape.output_product_flops) / shards
        early = traffic.early_gradient if treatment.gradient_pass == "S" else 0.0
        again = shape.vocab_recompute  # relative to the maximum of all shards, in T as in S
        looked_up = shape.elements * (2 if shape.depths else 1)  # for both ends of the pipeline
        scattered = traffic.scatter * looked_up
        moved: dict[PassKind, float] = {
            "S": (traffic.loss_forward + early) * logits,
            "E": 0.0 if again else traffic.exponentials * logits,
            "T": (traffic.loss_backward + (traffic.loss_forward if again else traffic.rescale))
            * logits,
            "IF": traffic.lookup * looked_up,
            "IB": scattered + traffic.gradient * shape.vocabulary_parameters / shards,
        }
        return {
            kind: treatment.products_of(kind, recompute=again) * product
            + device.traffic(moved[kind])
            + self._overhead(kind)
            for kind in treatment.passes
        }

    def communications(
        self, treatment: Treatment, stages: Sequence[tuple[int, int]] = ()
    ) -> dict[CommKind, HopTime]:
        """Return the time of every kind of communication; collectives are pipelined over ranks.

        Those of the vocabulary have two levels if several ranks share a layer: each sends its part
        of an activation along the pipeline, and the tensor ranks gather or scatter the parts.

        Args:
            treatment: of the vocabulary.
            stages: (rank, chunk) of every stage; without them no message leaves a machine.
        """
        hop = self._hops([rank for rank, _ in stages])
        comms: dict[CommKind, HopTime] = {"X": hop, "G": hop}
        if treatment.is_sharded:
            elements, ends = self.shape.elements, 2 if self.shape.depths else 1
            comms |= {
                "C0": self._spread(self.shape.output_elements),
                "CIF": ends * self._reduced(elements),
                "CIB": ends * self._spread(elements),
            }
        for barrier in treatment.barriers:
            comms[barrier.kind] = sum(map(self._payload, barrier.carries))
        return comms

    def _hops(self, ranks: Sequence[int]) -> HopTime:
        """Return the time of a message from each stage to the next; one time if all are alike."""
        size = self.shape.stream_bytes
        near = self.device.message(size)
        hops = [
            self.machines.between(self.device, one, other).message(size) if one != other else near
            for one, other in pairwise(ranks)
        ]
        return hops if any(hop != near for hop in hops) else near

    def _part(self, elements: int) -> float:
        """Return the time of a tensor rank's part of an activation along the pipeline."""
        size = ACTIVATION_BYTES * elements / self.shape.tensor.ranks
        return self.machines.along(self.device).message(size)

    def _spread(self, elements: int) -> float:
        """Return the time to bring an activation of one stage to all ranks."""
        return self._part(elements) + self._round(elements)

    def _reduced(self, elements: int) -> float:
        """Return the time to add up an activation at one stage.

        Without sequence parallelism the stage's ranks gather their parts of the sum.
        """
        rounds = 1 if self.shape.tensor.sequence_parallel else 2
        return self._part(elements) + rounds * self._round(elements)

    def _payload(self, payload: Payload) -> float:
        """Return the seconds for a barrier's payload: the gradient of X, or numbers per token."""
        if payload == "gradient":
            return self._reduced(self.shape.output_elements)
        size = 4 * FP32_OF_A_TOKEN[payload] * self.shape.outputs
        return self.machines.along(self.device).message(size) + self._statistics(payload)

    def _statistics(self, payload: Payload) -> float:
        """Return the time in which the tensor ranks gather numbers of every token."""
        ranks = self.shape.tensor.ranks
        size = 4 * FP32_OF_A_TOKEN[payload] * self.shape.outputs * ranks
        return self.machines.across(self.device).round(size, ranks)

    def _overhead(self, kind: PassKind) -> float:
        return self.device.overhead.get(kind, 0.0)
