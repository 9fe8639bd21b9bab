"""The scales of 8-bit factors: from a tensor itself, or from tensors of earlier iterations.

A scale maps the largest magnitude (*amax*) of a tensor to the largest number of its 8-bit type. To
find the amax in the tensor itself (``tensorwise``) costs one more reading of the tensor. *Delayed*
scaling takes the amax from earlier iterations instead (arXiv 2209.05433, section 4), and clips
larger values. At the end of an iteration the ranks that share a layer, and the replicas, exchange
the maximum of their amaxes. So scales are the same in every layout of ranks, and no pass waits for
the exchange.

Shapes: l layers of this rank; 3 tensors of each: input, weight and gradient of the output; h
iterations that are remembered.
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
        scale: fp32 [], factor of the tensor's numbers.
        worth: fp32 [], the inverse of ``scale``.
        seen: fp32 [], the quantiser raises it to the tensor's largest magnitude; ``None``: the
            magnitude is not recorded.
    """

    scale: Tensor
    worth: Tensor
    seen: Tensor | None = None


class Scaling(Protocol):
    """Finds the scales of one layer's tensors."""

    def of(self, role: Role, x: Tensor, dtype: torch.dtype) -> Scale:
        """Return the scale of a tensor; this may read the tensor.

        Args:
            role: the tensor's role in its layer: input, weight or gradient.
            x: the tensor.
            dtype: the 8-bit type.
        """
        ...

    def known(self, role: Role) -> Scale | None:
        """Return the scale of a future tensor; ``None``: the scale depends on the tensor."""
        ...


class OwnScales:
    """Every tensor is scaled by its own largest magnitude, as in Megatron's ``tensorwise``.

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

    Until the first iteration has ended, every tensor is scaled by its own magnitude. Magnitudes
    that are zero, infinite or NaN are ignored. If no other magnitude is known, the scale does not
    change.

    Args:
        names: of the layers, in the whole model.
        types: 8-bit types of the tensors of a layer, by role.
        kernels: of the layers.
        device: of the layers.
        length: number h of iterations that are remembered.
        takes_largest: use the largest magnitude of the remembered iterations, not the last one.
        margin: exponent of a power of two by which scales are divided.

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
        # A layer's history and scales are one tensor, for checkpoints; the scales are its last
        # column.
        self._state_l3h = torch.zeros(len(names), ROLES, length + 1, device=device)
        self._scales_l3 = self._state_l3h[..., -1].fill_(1.0)
        self._worths_l3 = torch.ones(len(names), ROLES, device=device)
        self._seen_l3 = torch.zeros_like(self._worths_l3)
        self.has_history = False
        self._records = False

    def of_layer(self, number: int) -> Scaling:
        """Return the scales of one layer."""
        return _OfLayer(self, number)

    def begin(self, *, records: bool) -> None:
        """Begin an iteration, and forget the magnitudes of an abandoned iteration.

        Args:
            records: whether magnitudes are recorded, as in training.
        """
        self._seen_l3.zero_()
        self._records = records

    def end(self, agree: Callable[[Tensor], None]) -> None:
        """End an iteration of training: its magnitudes give the scales of the next.

        Args:
            agree: replaces a tensor of this rank, in place, by the maximum over all ranks.
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
        """Return every layer's history [3, h + 1] by layer name; the last column is the scale."""
        return dict(zip(self.names, self._state_l3h, strict=True))

    def loaded(self) -> None:
        """Use the values that were loaded into ``tensors``."""
        torch.reciprocal(self._scales_l3, out=self._worths_l3)
        self.has_history = True

    def of(self, number: int, role: Role, x: Tensor, dtype: torch.dtype) -> Scale:
        """Return the scale of a tensor of a layer, as ``Scaling`` does."""
        known = self.known(number, role)
        return known or _scale_of(self._kernels.largest(x), dtype, self._seen(number, role))

    def known(self, number: int, role: Role) -> Scale | None:
        """Return the scale of a future tensor of a layer, as ``Scaling`` does."""
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
