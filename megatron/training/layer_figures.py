"""Figures of layers in an iteration: their own losses, and how evenly tokens choose experts.

Every rank knows beforehand which figures an iteration has. So they travel with the loss and the
gradient norm at the end of an iteration, as one vector, and cost no wait of their own.

If the load of every expert is recorded, the loads stand in the vector too: as float64, which is
exact for counts below 2**53.

Shapes: n losses of all layers, l layers with experts, e experts, r = 2, or 2 + e with loads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final

import torch
from torch import Tensor

from megatron.model.stage import RankModel
from megatron.optimizer.global_state import GlobalState
from megatron.parallel.groups import Groups
from megatron.runtime.layer_losses import Place, Sums, places_of


@dataclass(frozen=True)
class Imbalance:
    """The experts of one layer in one iteration.

    Attributes:
        layer: index of the layer in the whole model.
        expert: the expert that the most tokens have chosen.
        ratio: tokens of this expert divided by the mean over the experts; 1: all are equal.
        loads: how many tokens have chosen each expert; empty if this is not recorded.
    """

    layer: int
    expert: int
    ratio: float
    loads: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerReport:
    """The figures of all layers in an iteration; depths of multi-token prediction are layers too.

    Attributes:
        losses: without coefficients, means over the tokens that count, by layer and name.
        imbalances: one for every layer with experts.
    """

    losses: Mapping[Place, float] = field(default_factory=dict)
    imbalances: tuple[Imbalance, ...] = ()

    @property
    def mean_losses(self) -> dict[str, float]:
        """The mean over the layers that have a loss of a name, as in Megatron."""
        names = dict.fromkeys(name for _, name in self.losses)
        return {
            name: fmean(loss for (_, other), loss in self.losses.items() if other == name)
            for name in names
        }

    @property
    def largest(self) -> Imbalance | None:
        """The largest imbalance; ``None``: no layer has experts."""
        return max(self.imbalances, key=lambda own: own.ratio, default=None)


NO_LAYERS: Final = LayerReport()


def mean_of(reports: Sequence[LayerReport]) -> LayerReport:
    """Return the mean losses of some iterations, and the largest imbalance of every layer.

    Loads are added up over the iterations.
    """
    if not reports:
        return NO_LAYERS
    losses = {place: fmean(own.losses[place] for own in reports) for place in reports[0].losses}
    by_layer = zip(*(own.imbalances for own in reports), strict=True)
    return LayerReport(losses, tuple(map(_together, by_layer)))


def _together(of_layer: Sequence[Imbalance]) -> Imbalance:
    """Return the largest imbalance of a layer in some iterations, with the sum of all loads."""
    largest = max(of_layer, key=lambda own: own.ratio)
    return replace(
        largest, loads=tuple(map(sum, zip(*(own.loads for own in of_layer), strict=True)))
    )


@dataclass(frozen=True)
class LayerFigures:
    """The figures of an iteration, the same on every rank.

    Attributes:
        places: layer and name of every loss of a layer.
        layers: the layers with experts.
        depths: further tokens that every token predicts. In the sums their losses come before those
            of layers.
        experts: experts of a layer, if the load of each is recorded; otherwise 0.
    """

    places: tuple[Place, ...] = ()
    layers: tuple[int, ...] = ()
    depths: int = 0
    experts: int = 0

    @classmethod
    def of(cls, model: RankModel, groups: Groups, experts: int = 0) -> "LayerFigures":
        """Return the figures of the whole model; every rank calls it with its part."""
        everywhere = groups.pipeline.all_gather_object(places_of(model))
        places = sorted({place for own, _ in everywhere for place in own})
        layers = sorted({layer for _, own in everywhere for layer in own})
        return cls(tuple(places), tuple(layers), model.mtp_num_layers, experts)

    def joined(self, loss: Tensor, sums: Sums) -> Tensor:
        """Return the losses of layers behind ``loss``; losses of other ranks' layers are 0.

        Args:
            loss: of the next token and of the depths, [1 + D].
            sums: of this rank's layers.

        Returns:
            [1 + D + n].
        """
        if not self.places:
            return loss
        nothing = loss.new_zeros(())
        own = [sums.losses.get(place, nothing) for place in self.places]
        return torch.cat([loss, torch.stack(own).to(loss.dtype)])

    def imbalances(self, loads: Mapping[int, Tensor], device: torch.device) -> Tensor | None:
        """Return ratio, busiest expert and recorded loads of every layer; 0 for layers elsewhere.

        Args:
            loads: [e], the choices of the global batch, by layer of this rank.
            device: of the result.

        Returns:
            float64 [l r]; ``None`` if no layer has experts.
        """
        if not self.layers:
            return None
        found, nothing = {}, torch.zeros(2 + self.experts, dtype=torch.float64, device=device)
        if loads:
            loads_le = torch.stack(list(loads.values())).double()
            most = loads_le.max(-1)
            ratios_l = most.values / loads_le.mean(-1)
            balance_l2 = torch.stack([ratios_l, most.indices], -1)
            balance_lr = torch.cat([balance_l2, loads_le[:, : self.experts]], -1)
            found = dict(zip(loads, balance_lr, strict=True))
        return torch.cat([found.get(layer, nothing) for layer in self.layers])

    def read(self, full: GlobalState) -> tuple[tuple[float, ...], LayerReport]:
        """Return the losses of the depths, and the figures of layers, from the sums of all ranks.

        Behind the iteration's own figures, the sums have the losses of the depths, then the losses
        of layers, then the imbalances.
        """
        end = self.depths + len(self.places)
        losses = [full.factor * loss for loss in full.further[:end]]
        width = 2 + self.experts
        imbalances = []
        for layer, begin in zip(self.layers, range(end, len(full.further), width), strict=True):
            ratio, expert, *loads = full.further[begin : begin + width]
            imbalances.append(Imbalance(layer, int(expert), ratio, tuple(map(int, loads))))
        report = LayerReport(
            dict(zip(self.places, losses[self.depths :], strict=True)), tuple(imbalances)
        )
        return tuple(losses[: self.depths]), report


def summed_loads(sums: Sums, groups: Groups, *, splits_tokens: bool) -> dict[int, Tensor]:
    """Return the choices of the global batch, int64 [e], by layer of this rank.

    The ranks that hold the same layers call it together.

    Args:
        sums: of this rank's tokens.
        groups: this rank's view of the job.
        splits_tokens: whether the tensor-parallel ranks have different tokens.
    """
    if not sums.loads:
        return {}
    loads_le = torch.stack(list(sums.loads.values()))
    groups.data.all_reduce(loads_le)
    if splits_tokens:
        groups.tensor_sums.all_reduce(loads_le)
    return dict(zip(sums.loads, loads_le, strict=True))
