"""The angles of RoPE and its scalings, written out pair by pair."""

import math
from typing import Protocol

import torch


class Rotation(Protocol):
    """The options that decide the angles; see ``GPTOptions``."""

    @property
    def rotary_base(self) -> float: ...
    @property
    def rotary_base_local(self) -> float | None: ...
    @property
    def rotary_seq_len_interpolation_factor(self) -> int: ...
    @property
    def use_rope_scaling(self) -> bool: ...
    @property
    def rope_scaling_factor(self) -> float: ...
    @property
    def rope_type(self) -> str: ...
    @property
    def rotary_scaling_factor(self) -> float: ...
    @property
    def original_max_position_embeddings(self) -> int: ...
    @property
    def beta_fast(self) -> float: ...
    @property
    def beta_slow(self) -> float: ...
    @property
    def mscale(self) -> float: ...
    @property
    def mscale_all_dim(self) -> float: ...
    @property
    def rope_short_factors(self) -> tuple[float, ...]: ...
    @property
    def rope_long_factors(self) -> tuple[float, ...]: ...
    @property
    def yarn_exact_range(self) -> bool: ...


def frequencies(o: Rotation, half: int, length: int, *, windowed: bool) -> torch.Tensor:
    """Turns in radians per position of `half` pairs, for samples of `length` tokens."""
    local = o.rotary_base_local if windowed else None
    if local is not None:
        found = [local ** (-index / half) for index in range(half)]
        return torch.tensor(found, dtype=torch.float64)
    base: float = o.rotary_base
    longer = length / o.original_max_position_embeddings
    if o.rope_type == "dynamic" and longer > 1:
        grown = o.rotary_scaling_factor * longer - o.rotary_scaling_factor + 1
        base *= grown ** (half / (half - 1))
    plain = [base ** (-index / half) for index in range(half)]
    if o.rope_type == "yarn":
        plain = [_yarn(o, frequency, index, half) for index, frequency in enumerate(plain)]
    if o.rope_type == "longrope":
        divisors = o.rope_long_factors if longer > 1 else o.rope_short_factors
        plain = [frequency / own for frequency, own in zip(plain, divisors, strict=True)]
    if o.use_rope_scaling:
        plain = [_llama3(o, frequency) for frequency in plain]
    stretch = o.rotary_seq_len_interpolation_factor
    return torch.tensor([frequency / stretch for frequency in plain], dtype=torch.float64)


def length(o: Rotation, *, windowed: bool) -> float:
    """By how much what turns gets longer."""
    if windowed and o.rotary_base_local is not None:
        return 1.0
    if o.rope_type == "longrope":
        ratio = math.log(o.rotary_scaling_factor) / math.log(o.original_max_position_embeddings)
        return math.sqrt(1 + ratio)
    if o.rope_type != "yarn":
        return 1.0
    log = math.log(o.rotary_scaling_factor)
    return (1 + log * o.mscale / 10) / (1 + log * o.mscale_all_dim / 10)


def _llama3(o: Rotation, frequency: float) -> float:
    """By wavelength."""
    wavelength = 2 * math.pi / frequency
    if wavelength <= 8192 / 4:
        return frequency
    slow = frequency / o.rope_scaling_factor
    share = (8192 / wavelength - 1) / (4 - 1)
    return slow if wavelength > 8192 else (1 - share) * slow + share * frequency


def _yarn(o: Rotation, frequency: float, index: int, half: int) -> float:
    """By the index, between those of the pairs that turn `beta_fast` and `beta_slow` times."""

    def index_of(turns: float) -> float:
        full_turn = 2 * math.pi * turns / o.original_max_position_embeddings
        return -half * math.log(full_turn) / math.log(o.rotary_base)

    first, last = index_of(o.beta_fast), index_of(o.beta_slow)
    if not o.yarn_exact_range:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(0, first), min(2 * half - 1, last)
    slow = min(1, max(0, (index - first) / ((last - first) or 0.001)))
    return frequency * (1 - slow) + frequency / o.rotary_scaling_factor * slow
