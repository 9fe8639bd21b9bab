"""The flags of fp16 and its loss scale; ``--bf16`` stands with the flags of training."""

from dataclasses import dataclass
from typing import Final

from megatron.config.declare import COUNT, POSITIVE, flag

_FP16: Final = "--fp16"
_CONSTANT: Final = "--loss-scale"

# The formatter is off so that the flags read as a table.
# fmt: off


@dataclass(frozen=True)
class PrecisionFlags:
    """fp16, and the scale that its losses need."""

    fp16: bool = flag(False,
        "Parameters and activations in fp16, with a loss scale; master weights and gradients stay "
        "fp32.", excludes="--bf16")
    loss_scale: float | None = flag(None, "A loss scale that never changes.", POSITIVE,
        unset="one that changes", idle_without=_FP16)
    initial_loss_scale: float = flag(2.0**32, "The first loss scale.", POSITIVE,
        idle_without=_FP16, idle_with=_CONSTANT)
    min_loss_scale: float = flag(1.0, "The least loss scale.", POSITIVE, idle_without=_FP16,
        idle_with=_CONSTANT)
    loss_scale_window: int = flag(1000,
        "Steps without an overflow after which the loss scale is doubled.", COUNT,
        idle_without=_FP16, idle_with=_CONSTANT)
    hysteresis: int = flag(2,
        "Overflows after which the loss scale is halved, each time from then on until it is "
        "doubled.", COUNT, idle_without=_FP16, idle_with=_CONSTANT)
