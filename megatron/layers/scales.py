"""The scales of 8-bit factors: from a tensor itself, or from tensors of earlier iterations.

A scale maps the largest magnitude (*amax*) of a tensor to the largest number of its 8-bit type. To
find the amax in the tensor itself (``tensorwise``) costs one more reading of the tensor. *Delayed*
scaling takes the amax from earlier iterations instead (arXiv 2209.05433, section 4), and clips
larger values. At the end of an iteration the ranks that share a layer, and the replicas, exchange
the maximum of their amaxes. So from the second iteration on scales are the same in every layout of
ranks, and no pass waits for the exchange.

A layer of experts has scales for each expert, as if each expert were a layer of its own. Every rank
remembers the magnitudes of all experts of its layers, also of experts on other ranks. So ranks with
different experts exchange magnitudes like all other ranks, and a checkpoint suits any layout.

Shapes: l layers of this rank, each expert of a layer counting as one; 3 tensors of each: input,
weight and gradient of the output; h iterations that are remembered; g experts of this rank, s rows
of all of them, k width of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from megatron.kernels.eight_bits import LEAST, largest_number
from megatron.kernels.face import Kernels

Role: TypeAlias = Literal[0, 1, 2]
INPUT: Final[Role] = 0
WEIGHT: Final[Role] = 1
GRADIENT: Final[Role] = 2
ROLES: Final = 3


@dataclass(frozen=True)
class Scale:
    """How a tensor is quantised; with experts all are [g] in place of [].

    Attributes:
        scale: fp32 [], factor of the tensor's numbers.
        worth: fp32 [], the inverse of ``scale``.
        seen: fp32 [], the quantiser raises it to the tensor's largest magnitude; ``None``: the
            magnitude is not recorded.
    """

    scale: Tensor
    worth: Tensor
    seen: Tensor | None = None


class Scaling(Protocol):
    """Finds the scales of one layer's tensors; a layer of experts has one for each expert."""

    def of(self, role: Role, x: Tensor, dtype: torch.dtype, ends_g: Tensor | None = None) -> Scale:
        """Return the scale of a tensor, or of the experts' parts of it; this may read the tensor.

        Args:
            role: the tensor's role in its layer: input, weight or gradient.
            x: the tensor; with experts [s, k], and the rows of one lie one after the other.
            dtype: the 8-bit type.
            ends_g: int32, the row behind the last row of each expert; ``None``: no experts.
        """
        ...

    def known(self, role: Role) -> Scale | None:
        """Return the scale of a future tensor; ``None``: the scale depends on the tensor."""
        ...


class OwnScales:
    """Every tensor is scaled by its own largest magnitude, as in Megatron's ``tensorwise``.

    Each expert's part of a tensor counts as a tensor.

    Args:
        kernels: of the layer.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def of(self, role: Role, x: Tensor, dtype: torch.dtype, ends_g: Tensor | None = None) -> Scale:
        """See ``Scaling``."""
        return scale_of(_largest(self._kernels, x, ends_g), dtype)

    def known(self, role: Role) -> None:
        """See ``Scaling``."""


def _largest(kernels: Kernels, x: Tensor, ends_g: Tensor | None) -> Tensor:
    """Return the largest magnitude of a tensor, or of each expert's part of it."""
    return kernels.largest(x) if ends_g is None else kernels.largest_of_groups(x, ends_g)


def scale_of(amax: Tensor, dtype: torch.dtype, seen: Tensor | None = None) -> Scale:
    """Return the scale that maps a largest magnitude to the largest number of ``dtype``.

    Args:
        amax: fp32, of any shape; the results have the same.
        dtype: of 8 bits.
        seen: see ``Scale``.
    """
    amax, most = amax.clamp(min=LEAST), largest_number(dtype)
    return Scale(most / amax, amax / most, seen)


class DelayedScales:
    """The scales of all layers of a rank, from the tensors of earlier iterations.

    Until the first iteration has ended, every tensor is scaled by its own magnitude. Magnitudes
    that are zero, infinite or NaN are ignored. If no other magnitude is known, the scale does not
    change; an expert that has had no token takes the largest magnitude of its layer's experts.

    Args:
        names: of the layers, in the whole model.
        types: 8-bit types of the tensors of a layer, by role.
        kernels: of the layers.
        device: of the layers.
        experts: number of experts on all ranks, for the layers of experts, by name.
        length: number h of iterations that are remembered.
        takes_largest: use the largest magnitude of the remembered iterations, not the last one.
        margin: exponent of a power of two by which scales are divided.

    Attributes:
        kernels: of the layers.
        has_history: whether an iteration has ended, here or before a checkpoint.
    """

    def __init__(
        self,
        names: Sequence[str],
        types: Mapping[Role, torch.dtype],
        kernels: Kernels,
        device: torch.device,
        *,
        experts: Mapping[str, int] | None = None,
        length: int = 1,
        takes_largest: bool = False,
        margin: int = 0,
    ) -> None:
        self._experts = experts or {}
        sizes = [self._experts.get(name, 1) for name in names]
        ends = tuple(accumulate(sizes))
        self._places = {
            name: slice(end - size, end) for name, end, size in zip(names, ends, sizes, strict=True)
        }
        count = sum(sizes)
        self.kernels = kernels
        self._takes_largest = takes_largest
        most = [largest_number(types[role]) / 2**margin for role in (INPUT, WEIGHT, GRADIENT)]
        self._most_3 = torch.tensor(most, device=device)
        # A layer's history and scales are one tensor, for checkpoints; the scales are its last
        # column.
        self._state_l3h = torch.zeros(count, ROLES, length + 1, device=device)
        self._scales_l3 = self._state_l3h[..., -1].fill_(1.0)
        # For every row of the state the number of its layer, which all experts of a layer share.
        layers = [layer for layer, size in enumerate(sizes) for _ in range(size)]
        self._layer_l3 = torch.tensor(layers, device=device)[:, None].expand(-1, ROLES)
        # The scales of a layer's experts, in one role, are contiguous.
        self._scales_3l, self._worths_3l = torch.ones(2, ROLES, count, device=device)
        # cuBLAS reads the worth of a whole tensor only from a multiple of 16 bytes.
        self._apart_3l4 = torch.ones(ROLES, count, 4, device=device)
        self._seen_3l, self._noted_3l = torch.zeros(2, *self._worths_3l.shape, device=device)
        self.has_history = False
        self._records = False

    def of_layer(self, name: str, own: range | None = None) -> "LayerScales":
        """Return the scales of one layer.

        Args:
            name: of the layer.
            own: this rank's experts, for a layer of experts.
        """
        begin = self._places[name].start
        if own is None:
            return LayerScales(self, begin)
        return LayerScales(self, slice(begin + own.start, begin + own.stop))

    def begin(self, *, records: bool) -> None:
        """Begin an iteration, and forget the magnitudes of an abandoned iteration.

        Args:
            records: whether magnitudes are recorded, as in training.
        """
        self._seen_3l.zero_()
        self._records = records

    def end(self, agree: Callable[[Tensor], None]) -> None:
        """End an iteration of training: its magnitudes give the scales of the next.

        Args:
            agree: replaces a tensor of this rank, in place, by the maximum over all ranks.
        """
        seen_3l = torch.maximum(self._seen_3l, self._noted_3l)
        # Before the exchange: an infinity of one rank would be the maximum of all.
        seen_l3 = seen_3l.where(seen_3l.isfinite(), 0.0).T.contiguous()
        agree(seen_l3)
        history_l3h = self._state_l3h[..., :-1]
        history_l3h.copy_(torch.cat((seen_l3.unsqueeze(-1), history_l3h[..., :-1]), dim=-1))
        amax_l3 = history_l3h.amax(-1) if self._takes_largest else seen_l3
        if self._experts:
            amax_l3 = self._of_other_experts(amax_l3)
        scaled_l3 = self._most_3 / amax_l3.clamp(min=LEAST)
        self._scales_l3.copy_(scaled_l3.where(amax_l3 > 0, self._scales_l3))
        self.loaded()

    def _of_other_experts(self, amax_l3: Tensor) -> Tensor:
        """Return magnitudes in which experts without any have the largest one of their layer.

        An expert that has had no token yet would multiply its first tokens by the scale 1, with
        which small gradients are zero. Experts of a layer have scales of similar size.
        """
        of_layer_l3 = torch.zeros_like(amax_l3).scatter_reduce(0, self._layer_l3, amax_l3, "amax")
        begins_l3 = (amax_l3 == 0) & (self._scales_l3 == 1.0)
        return of_layer_l3.gather(0, self._layer_l3).where(begins_l3, amax_l3)

    def tensors(self) -> dict[str, Tensor]:
        """Return every layer's history [3, h + 1] by layer name; the last column is the scale.

        The history of a layer of experts is [experts, 3, h + 1].
        """
        return {
            name: self._state_l3h[place if name in self._experts else place.start]
            for name, place in self._places.items()
        }

    def loaded(self) -> None:
        """Use the values that were loaded into ``tensors``."""
        self._scales_3l.copy_(self._scales_l3.T)
        # From the scales alone: a checkpoint has no worths, and an unused tensor has no magnitude.
        torch.reciprocal(self._scales_3l, out=self._worths_3l)
        self._apart_3l4.copy_(self._worths_3l.unsqueeze(-1))
        self.has_history = True

    def known(self, place: int | slice, role: Role) -> Scale | None:
        """Return the scales of future tensors; ``None``: the scales depend on the tensors."""
        if not self.has_history:
            return None
        worths_3l = self._worths_3l if isinstance(place, slice) else self._apart_3l4[..., 0]
        scales, worths = self._scales_3l[role, place], worths_3l[role, place]
        return Scale(scales, worths, self.seen(place, role))

    def seen(self, place: int | slice, role: Role) -> Tensor | None:
        """Return where largest magnitudes are recorded; ``None``: nowhere."""
        return self._seen_3l[role, place] if self._records else None

    def note(self, place: int | slice, role: Role, largest: Tensor) -> None:
        """See ``LayerScales``."""
        own = self._noted_3l[role, place]
        own.copy_(largest.view(own.shape))


@dataclass(frozen=True)
class LayerScales:
    """See ``Scaling``: the scales of one layer, or of several experts of a layer.

    Attributes:
        scales: of all layers.
        place: of this one.
    """

    scales: DelayedScales
    place: int | slice

    def of(self, role: Role, x: Tensor, dtype: torch.dtype, ends_g: Tensor | None = None) -> Scale:
        """See ``Scaling``."""
        known = self.known(role)
        if known is not None:
            return known
        largest = _largest(self.scales.kernels, x, ends_g)
        return scale_of(largest, dtype, self.scales.seen(self.place, role))

    def known(self, role: Role) -> Scale | None:
        """See ``Scaling``."""
        return self.scales.known(self.place, role)

    def note(self, role: Role, largest: Tensor) -> None:
        """Note the magnitude of a tensor that is not quantised in every iteration.

        It counts as seen in all iterations, until another one is noted.

        Args:
            role: the tensor's role in the layer.
            largest: fp32, one for the layer or for each of its experts; of this rank's part.
        """
        self.scales.note(self.place, role, largest)
