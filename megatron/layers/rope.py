"""Rotary position embedding: pairs of a head's channels turn by an angle that grows with position.

Channel i of the first half of the rotated channels forms a pair with channel i of the second half
(the "half rotation" of GPT-NeoX and Megatron). With ``interleaved``, channels 2i and 2i + 1 form a
pair, as in the paper (arXiv 2104.09864).

Shapes: b batch, s sequence, a heads, d channels of a head, r rotated pairs.
"""

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.rope_scaling import RopeScaling, plain_frequencies
from megatron.layers.site import Site


class RotaryEmbedding:
    """Angles ``position * base ** (-2i / rotated channels)``, computed in float64, kept in fp32.

    A scaling has other angles, and may also lengthen the rotated channels.

    It is not a module, because casting a model to bf16 must not cast the angles.

    Args:
        head_size: channels d of a head.
        seq_length: positions in the table.
        rotary_percent: share of the channels that turn; the others pass unchanged.
        rotary_base: theta of the paper.
        device: where the table lives.
        interleaved: neighbouring channels form a pair, instead of channels of the two halves.
        interpolation: divisor of the positions (arXiv 2306.15595).
        scaling: scaling of the frequencies; ``None``: no scaling.
        dtype: of the angles; it must be at least as wide as the activations' dtype.
        kernels: of the device and of the activations' dtype; ``None``: PyTorch's operations.

    Raises:
        ValueError: the rotated channels cannot be paired.
    """

    def __init__(
        self,
        head_size: int,
        seq_length: int,
        rotary_percent: float,
        rotary_base: float,
        device: torch.device,
        *,
        interleaved: bool = False,
        interpolation: int = 1,
        scaling: RopeScaling | None = None,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels | None = None,
    ) -> None:
        rotated = int(head_size * rotary_percent)
        if rotated < 2 or rotated % 2 or rotated > head_size:
            raise ValueError(
                f"--rotary-percent {rotary_percent} rotates {rotated} of the {head_size} channels "
                "of a head: choose a share that makes an even number of them, at least 2"
            )
        if scaling is None:
            frequency_r, magnitude = plain_frequencies(rotary_base, rotated // 2), 1.0
        else:
            frequency_r = scaling.frequencies(rotary_base, rotated // 2)
            magnitude = scaling.magnitude
        made_on = device if device.type == "meta" else "cpu"  # without values, there is no work
        position_s = torch.arange(seq_length, dtype=torch.float64, device=made_on) / interpolation
        angle_s1r = torch.outer(position_s, frequency_r.to(made_on))[:, None]
        self._cos_s1r = (magnitude * angle_s1r.cos()).to(device, dtype)
        self._sin_s1r = (magnitude * angle_s1r.sin()).to(device, dtype)
        self._interleaved = interleaved
        self._kernels = kernels or ReferenceKernels()

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """The cosines and the sines of the angles."""
        return self._cos_s1r, self._sin_s1r

    def __call__(self, x_bsad: Tensor) -> Tensor:
        """Turn the heads at position i by the i-th angles.

        Args:
            x_bsad: queries or keys [b, s, a, d], any floating type, any strides.

        Returns:
            A contiguous tensor of the shape and dtype of ``x_bsad``; bf16 is rounded only once, at
            the end.
        """
        seq_length, positions = x_bsad.shape[1], self._cos_s1r.shape[-3]
        assert seq_length <= positions, (seq_length, positions)
        cos_s1r, sin_s1r = (t[..., :seq_length, :, :] for t in (self._cos_s1r, self._sin_s1r))
        return self._kernels.rotate(x_bsad, cos_s1r, sin_s1r, interleaved=self._interleaved)

    def at(self, positions_bs: Tensor) -> "RotaryEmbedding":
        """Return the rotation for tokens at given positions, in place of 0, 1, 2, ...

        Args:
            positions_bs: position of every token of a microbatch, int64 [b, s]; the angles are then
                [b, s, 1, r].
        """
        placed = copy(self)
        placed._cos_s1r = self._cos_s1r[positions_bs]
        placed._sin_s1r = self._sin_s1r[positions_bs]
        return placed


@dataclass(frozen=True)
class Rotation:
    """The numbers of a ``RotaryEmbedding``; layers with equal rotations share a table."""

    head_size: int
    seq_length: int
    percent: float
    base: float
    interleaved: bool = False
    interpolation: int = 1
    scaling: RopeScaling | None = None

    def build(self, site: Site) -> RotaryEmbedding:
        """Return the rotation for activations in the site's dtype."""
        return RotaryEmbedding(
            self.head_size,
            self.seq_length,
            self.percent,
            self.base,
            site.device,
            interleaved=self.interleaved,
            interpolation=self.interpolation,
            scaling=self.scaling,
            dtype=torch.promote_types(site.dtype, torch.float32),
            kernels=site.kernels,
        )
