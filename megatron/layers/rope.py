"""Rotary position embedding: pairs of a head's channels turn by an angle that grows with position.

Channel i of the first half of the rotated channels forms a pair with channel i of the second half
(the "half rotation" of GPT-NeoX and Megatron). With ``interleaved``, channels 2i and 2i + 1 form a
pair, as in the paper (arXiv 2104.09864).

Shapes: b batch, s sequence, a heads, d channels of a head, r rotated pairs.
"""

import math
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling of the frequencies, which prepares a trained model for longer samples.

    The scaling of a pair depends on its number of full turns within a sample of the original
    training. With ``high_freq_factor`` turns or more, the frequency stays. With ``low_freq_factor``
    turns or fewer, it is divided by ``factor``. In between, the scaling is interpolated linearly.
    The formula is that of Hugging Face's rope type ``llama3``, with the defaults of Llama 3.1. Of
    these numbers Megatron-LM has a flag only for ``factor``.

    Attributes:
        factor: divisor of the lowest frequencies, at least 1.
        low_freq_factor: number of turns up to which a frequency is divided by ``factor``.
        high_freq_factor: number of turns from which a frequency stays; more than
            ``low_freq_factor``.
        original_length: tokens of a sample in the original training.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def scaled(self, frequency_r: Tensor) -> Tensor:
        """Return the scaled frequencies.

        Args:
            frequency_r: angles per position [r].
        """
        turns_r = frequency_r * (self.original_length / (2 * math.pi))
        share_r = (turns_r - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(frequency_r / self.factor, frequency_r, share_r.clamp(0, 1))


class RotaryEmbedding:
    """Angles ``position * base ** (-2i / rotated channels)``, computed in float64, kept in fp32.

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
        rotary_base: int,
        device: torch.device,
        *,
        interleaved: bool = False,
        interpolation: int = 1,
        scaling: Llama3Scaling | None = None,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels | None = None,
    ) -> None:
        rotated = int(head_size * rotary_percent)
        if rotated < 2 or rotated % 2 or rotated > head_size:
            raise ValueError(
                f"--rotary-percent {rotary_percent} rotates {rotated} of the {head_size} channels "
                "of a head: choose a share that makes an even number of them, at least 2"
            )
        exponent_r = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
        frequency_r = float(rotary_base) ** -exponent_r
        if scaling is not None:
            frequency_r = scaling.scaled(frequency_r)
        position_s = torch.arange(seq_length, dtype=torch.float64) / interpolation
        angle_s1r = torch.outer(position_s, frequency_r)[:, None]
        self._cos_s1r = angle_s1r.cos().to(device, dtype)
        self._sin_s1r = angle_s1r.sin().to(device, dtype)
        self._interleaved = interleaved
        self._kernels = kernels or ReferenceKernels()

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
