"""The scales of factors in 8 bits: from a tensor itself, or from those of earlier iterations.

A scale takes the largest magnitude (*amax*) of a tensor to the largest number of its type. To find
it in the tensor itself (``tensorwise``) costs one more reading. *Delayed* scaling takes it from
earlier iterations instead (arXiv 2209.05433, section 4): what is larger than all that was seen is
cut off. At the end of an iteration the ranks that share a layer, and the replicas, agree on the
largest of their tensors. So their scales are the same, in every layout; no pass waits for it.

Shapes: k tensors: of every layer here its input, its weight and the gradient of its output; l
layers; h iterations that are remembered.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    """How a tensor is quantised.

    Attributes:
        scale: fp32 [], its numbers are multiplied by it.
        worth: fp32 [], the inverse.
        seen: fp32 [], to be raised to its largest magnitude; ``None``: nobody asks for that.
    """

    scale: Tensor
    worth: Tensor
    seen: Tensor | None = None


class Scaling(Protocol):
    """Finds the scales of one layer's tensors."""

    def of(self, role: Role, x: Tensor, dtype: torch.dtype) -> Scale:
        """Return the scale of a tensor, which may be read for it.

        Args:
            role: what it is to its layer.
            x: the tensor.
            dtype: of 8 bits.
        """
        ...

    def known(self, role: Role) -> Scale | None:
        """Return the scale of a tensor that is not there yet; ``None``: it takes the tensor."""
        ...


class OwnScales:
    """Every tensor is scaled by its own largest magnitude, as Megatron's ``tensorwise`` has it.

    Args:
        kernels: of the layer.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def of(self, role: Role, x: Tensor, dtype: torch.dtype) -> Scale:
        """See ``Scaling``."""
        return _scale_of(self._kernels.largest(x), dtype)

    def known(self, role: Role) -> None:
        """See ``Scaling``."""


def _scale_of(amax: Tensor, dtype: torch.dtype, seen: Tensor | None = None) -> Scale:
    amax, most = amax.clamp(min=LEAST), largest_number(dtype)
    return Scale(most / amax, amax / most, seen)


class DelayedScales:
    """The scales of all layers of a rank, from the tensors of earlier iterations.

    Until an iteration has ended, every tensor is scaled by itself. A magnitude that is zero,
    infinite or NaN tells nothing: it is left out, and if nothing else is known the scale stays.

    Args:
        names: of the layers, in the whole model.
        types: of the tensors of a layer, by role.
        kernels: of the layers.
        device: of them.
        length: iterations h that are remembered.
        takes_largest: the scale follows from the largest magnitude of them, not from the last.
        margin: a scale is smaller by this power of two.

    Attributes:
        has_history: whether an iteration has ended, here or before a checkpoint.
    """

    def __init__(
        self,
        names: Sequence[str],
        types: Mapping[Role, torch.dtype],
        kernels: Kernels,
        device: torch.device,
        *,
        length: int = 1,
        takes_largest: bool = False,
        margin: int = 0,
    ) -> None:
        self.names = names
        self._kernels = kernels
        self._takes_largest = takes_largest
        most = [largest_number(types[role]) / 2**margin for role in (INPUT, WEIGHT, GRADIENT)]
        self._most_3 = torch.tensor(most, device=device)
        # A layer's memory is one piece, as checkpoints need; its last column has the scales.
        self._state_l3h = torch.zeros(len(names), ROLES, length + 1, device=device)
        self._scales_l3 = self._state_l3h[..., -1].fill_(1.0)
        self._worths_l3 = torch.ones(len(names), ROLES, device=device)
        self._seen_l3 = torch.zeros_like(self._worths_l3)
        self.has_history = False
        self._records = False

    def of_layer(self, number: int) -> Scaling:
        """Return the part of one layer."""
        return _OfLayer(self, number)

    def begin(self, *, records: bool) -> None:
        """Begin an iteration; one that was given up is forgotten.

        Args:
            records: whether magnitudes of its tensors are remembered, as in training.
        """
        self._seen_l3.zero_()
        self._records = records

    def end(self, agree: Callable[[Tensor], None]) -> None:
        """End an iteration of training: its magnitudes give the scales of the next.

        Args:
            agree: writes the largest of all ranks into a tensor of this one.
        """
        seen_l3 = self._seen_l3.where(self._seen_l3.isfinite(), 0.0)
        agree(seen_l3)
        history_l3h = self._state_l3h[..., :-1]
        history_l3h.copy_(torch.cat((seen_l3.unsqueeze(-1), history_l3h[..., :-1]), dim=-1))
        amax_l3 = history_l3h.amax(-1) if self._takes_largest else seen_l3
        scaled_l3 = self._most_3 / amax_l3.clamp(min=LEAST)
        self._scales_l3.copy_(scaled_l3.where(amax_l3 > 0, self._scales_l3))
        self.loaded()

    def tensors(self) -> dict[str, Tensor]:
        """Return the memory of every layer [3, h + 1] by its name; the last column is the scale."""
        return dict(zip(self.names, self._state_l3h, strict=True))

    def loaded(self) -> None:
        """Use what ``tensors`` hold now."""
        torch.reciprocal(self._scales_l3, out=self._worths_l3)
        self.has_history = True

    def of(self, number: int, role: Role, x: Tensor, dtype: torch.dtype) -> Scale:
        """Return the scale of a tensor of a layer, as ``Scaling`` does."""
        known = self.known(number, role)
        return known or _scale_of(self._kernels.largest(x), dtype, self._seen(number, role))

    def known(self, number: int, role: Role) -> Scale | None:
        """Return the scale that a tensor of a layer will have, as ``Scaling`` does."""
        if not self.has_history:
            return None
        scale, worth = self._scales_l3[number, role], self._worths_l3[number, role]
        return Scale(scale, worth, self._seen(number, role))

    def _seen(self, number: int, role: Role) -> Tensor | None:
        return self._seen_l3[number, role] if self._records else None


@dataclass(frozen=True)
class _OfLayer:
    scales: DelayedScales
    number: int

    def of(self, role: Role, x: Tensor, dtype: torch.dtype) -> Scale:
        """See ``Scaling``."""
        return self.scales.of(self.number, role, x, dtype)

    def known(self, role: Role) -> Scale | None:
        """See ``Scaling``."""
        return self.scales.known(self.number, role)
