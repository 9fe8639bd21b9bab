"""Times of a model's parts, from the model's shape and the rates of a device.

``stage_costs.py`` adds these times up for the stages of a plan: on the notional device to place
passes, and on a GPU to predict the time of a run. There is no other model of time.
"""

from dataclasses import dataclass

from megatron.schedules.needs import CommKind
from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import FP32_OF_A_TOKEN, Payload, Treatment
from megatron.simulator.costs.device import UNFUSED, Device, Traffic
from megatron.simulator.costs.shape import ACTIVATION_BYTES, Shape


@dataclass(frozen=True)
class ModelTimes:
    """Seconds of the parts of a model on a device.

    Attributes:
        shape: the model and one microbatch.
        device: the device that runs them.
        traffic: memory traffic of its kernels.
        early_whole: whether a whole output layer computes its input gradient in F, right after the
            logits, as ours does; else in B, as Megatron-LM does.
    """

    shape: Shape
    device: Device
    traffic: Traffic = UNFUSED
    early_whole: bool = False

    def layer(self) -> dict[PassKind, float]:
        """Return the times of one transformer layer: F, B without weight gradients, and W.

        Attention itself has no weights, so its whole backward is in B.
        """
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
        """Return the time that a whole output layer adds to each pass of its stage."""
        device, traffic, logits = self.device, self.traffic, self.shape.logits
        product = device.product("output", self.shape.output_product_flops)
        forward = product + device.traffic(traffic.loss_forward * logits) + self._overhead("S")
        loss = device.traffic(traffic.loss_backward * logits)
        if self.early_whole:
            early = product + device.traffic(traffic.early_gradient * logits)
            return {"F": forward + early, "B": 0.0, "W": product + loss + self._overhead("T")}
        return {"F": forward, "B": product + loss + self._overhead("T"), "W": product}

    def whole_input(self) -> dict[PassKind, float]:
        """Return the time that a whole input layer adds to each pass of its stage."""
        shape, device, traffic = self.shape, self.device, self.traffic
        return {
            "F": device.traffic(traffic.lookup * shape.elements) + self._overhead("IF"),
            "B": device.traffic(traffic.scatter * shape.elements),
            "W": device.traffic(traffic.gradient * shape.vocabulary_parameters)
            + self._overhead("IB"),
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
        scattered = traffic.scatter * shape.elements
        moved: dict[PassKind, float] = {
            "S": (traffic.loss_forward + early) * logits,
            "E": traffic.exponentials * logits,
            "T": (traffic.loss_backward + traffic.rescale) * logits,
            "IF": traffic.lookup * shape.elements,
            "IB": scattered + traffic.gradient * shape.vocabulary_parameters / shards,
        }
        return {
            kind: treatment.products.get(kind, 0) * product
            + device.traffic(moved[kind])
            + self._overhead(kind)
            for kind in treatment.passes
        }

    def communications(self, treatment: Treatment) -> dict[CommKind, float]:
        """Return the time of every kind of communication; collectives are pipelined over ranks."""
        hop = self.device.message(ACTIVATION_BYTES * self.shape.elements)
        between_stages = self.device.message(self.shape.stream_bytes)
        comms: dict[CommKind, float] = {"X": between_stages, "G": between_stages}
        if treatment.is_sharded:
            comms |= {"C0": hop, "CIF": hop, "CIB": hop}
        for barrier in treatment.barriers:
            comms[barrier.kind] = sum(map(self._payload, barrier.carries))
        return comms

    def _payload(self, payload: Payload) -> float:
        """Return the seconds for a barrier's payload: the gradient of X, or numbers per token."""
        if payload == "gradient":
            return self.device.message(ACTIVATION_BYTES * self.shape.elements)
        return self.device.message(4 * FP32_OF_A_TOKEN[payload] * self.shape.tokens)

    def _overhead(self, kind: PassKind) -> float:
        return self.device.overhead.get(kind, 0.0)
