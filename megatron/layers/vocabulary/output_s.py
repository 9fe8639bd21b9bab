"""The words in which passes and barriers speak of the output layer; see ``kernels.softmax``."""

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
