"""The names from ``kernels.softmax`` that passes and barriers use for the output layer."""

from megatron.kernels.softmax import (
    HasStatistics,
    LossOptions,
    Merged,
    ShardState,
    merge_some_statistics,
    merge_statistics,
    statistics_dtype,
    token_losses,
)

__all__ = [
    "HasStatistics",
    "LossOptions",
    "Merged",
    "ShardState",
    "merge_some_statistics",
    "merge_statistics",
    "statistics_dtype",
    "token_losses",
]
