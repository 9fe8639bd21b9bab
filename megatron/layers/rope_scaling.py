"""Scalings of RoPE's frequencies, which prepare a trained model for longer samples.

Pair i of r rotated pairs turns by ``base ** (-i / r)`` radians per position before it is scaled.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


def plain_frequencies(base: float, pairs: int) -> Tensor:
    """Return the frequencies without a scaling, in radians per position, float64 [r]."""
    exponent_r = torch.arange(pairs, dtype=torch.float64) / pairs
    return float(base) ** -exponent_r


class RopeScaling(Protocol):
    """How frequencies change, and the length of the channels that turn."""

    @property
    def magnitude(self) -> float:
        """The factor of rotated channels."""
        ...

    def frequencies(self, base: float, pairs: int) -> Tensor:
        """Return the scaled frequencies in radians per position, float64 [r].

        Args:
            base: theta of RoPE.
            pairs: number r of rotated pairs.
        """
        ...


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies are divided, high frequencies stay.

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

    @property
    def magnitude(self) -> float:
        """See ``RopeScaling``."""
        return 1.0

    def frequencies(self, base: float, pairs: int) -> Tensor:
        """See ``RopeScaling``."""
        return self.scaled(plain_frequencies(base, pairs))

    def scaled(self, frequency_r: Tensor) -> Tensor:
        """Return the scaled frequencies.

        Args:
            frequency_r: angles per position [r].
        """
        turns_r = frequency_r * (self.original_length / (2 * math.pi))
        share_r = (turns_r - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(frequency_r / self.factor, frequency_r, share_r.clamp(0, 1))


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): it divides low frequencies, and lengthens rotated channels.

    It differs from Llama 3's scaling in the pairs between: YaRN interpolates linearly in the index
    of the pair. Longer queries and keys make larger scores, a temperature of the softmax.

    Attributes:
        factor: divisor of the lowest frequencies, at least 1.
        original_length: tokens of a sample in the original training.
        beta_fast: number of turns in such a sample from which a frequency stays.
        beta_slow: number of turns up to which a frequency is divided by ``factor``.
        mscale: weight of the logarithm of ``factor`` in the length of the channels that turn.
        mscale_all_dim: weight of the logarithm by which that length is divided. Multi-latent
            attention scales all channels by this divisor instead, see ``length_factor``.
        exact_range: the interpolation begins and ends between pairs; else the indices of its ends
            are rounded outwards to whole pairs.
    """

    factor: float
    original_length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    exact_range: bool = False

    @property
    def magnitude(self) -> float:
        """See ``RopeScaling``."""
        own = length_factor(self.factor, self.mscale)
        return own / length_factor(self.factor, self.mscale_all_dim)

    def frequencies(self, base: float, pairs: int) -> Tensor:
        """See ``RopeScaling``."""
        first, last = (self._pair_of(turns, base, pairs) for turns in self._betas)
        if not self.exact_range:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        if first == last:
            last += 0.001  # as all implementations have it
        slow_r = ((torch.arange(pairs, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
        frequency_r = plain_frequencies(base, pairs)
        return torch.lerp(frequency_r, frequency_r / self.factor, slow_r)

    @property
    def _betas(self) -> tuple[float, float]:
        return self.beta_fast, self.beta_slow

    def _pair_of(self, turns: float, base: float, pairs: int) -> float:
        """Return the index, between pairs, at which a sample has so many turns."""
        return pairs * math.log(self.original_length / (2 * math.pi * turns)) / math.log(base)


def length_factor(factor: float, weight: float) -> float:
    """Return by how much YaRN lengthens vectors whose frequencies are divided by ``factor``.

    Args:
        factor: divisor of the lowest frequencies.
        weight: of the logarithm; YaRN's paper has 1.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK scaling: in samples longer than the original ones, theta grows.

    The lowest frequency is divided by ``factor * length / original_length - (factor - 1)``, the
    highest one stays.

    Attributes:
        factor: at least 1.
        original_length: tokens of a sample in the original training.
        length: tokens of a sample; up to ``original_length`` nothing is scaled.
    """

    factor: float
    original_length: int
    length: int

    @property
    def magnitude(self) -> float:
        """See ``RopeScaling``."""
        return 1.0

    def frequencies(self, base: float, pairs: int) -> Tensor:
        """See ``RopeScaling``."""
        length = max(self.length, self.original_length)
        stretch = self.factor * length / self.original_length - (self.factor - 1)
        # The lowest frequency is theta^(-(r - 1) / r): this power of ``stretch`` divides it by
        # ``stretch``.
        return plain_frequencies(base * stretch ** (pairs / (pairs - 1)), pairs)


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753) as in Phi-3: it divides every frequency by a number of its own.

    Rotated channels are longer by one number for all samples, short or long.

    Attributes:
        factor: how many times the original length the longest samples have; at least 1.
        original_length: tokens of a sample in the original training.
        divisors: divisor of every frequency; short and long samples have different ones.
    """

    factor: float
    original_length: int
    divisors: tuple[float, ...]

    @property
    def magnitude(self) -> float:
        """See ``RopeScaling``."""
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))

    def frequencies(self, base: float, pairs: int) -> Tensor:
        """See ``RopeScaling``."""
        assert len(self.divisors) == pairs, f"{len(self.divisors)} divisors for {pairs} pairs"
        return plain_frequencies(base, pairs) / torch.tensor(self.divisors, dtype=torch.float64)
