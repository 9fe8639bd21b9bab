"""The lengths of the slices of a model's samples."""

from functools import lru_cache, partial

from megatron.model.flops import layers_flops
from megatron.model.settings import ModelSettings
from megatron.schedules.slice_lengths import SliceStrategy, slice_lengths


@lru_cache(256)
def lengths_of_slices(
    config: ModelSettings, slices: int, strategy: SliceStrategy
) -> tuple[int, ...]:
    """Return the tokens of every slice of a sample; ``balanced`` ones have equal FLOPs in layers.

    Raises:
        ValueError: the sequence cannot be cut so; the message names the flags.
    """
    return slice_lengths(config.seq_length, slices, strategy, partial(layers_flops, config))
