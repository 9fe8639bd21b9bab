"""The flags of fp16, of its loss scale, and of types that differ from what the others imply."""

from dataclasses import dataclass
from typing import Final, Literal

from megatron.config.declare import COUNT, POSITIVE, flag
from megatron.optimizer.config import MomentType

_FP16: Final = "--fp16"
_CONSTANT: Final = "--loss-scale"

# The formatter is off so that the flags read as a table.
# fmt: off


@dataclass(frozen=True)
class PrecisionFlags:
    """fp16 with its loss scale, and types of gradients and moments."""

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
    use_precision_aware_optimizer: bool = flag(False,
        "Allow other types of gradients and moments, with --optimizer adam; as in Megatron they "
        "need it.")
    main_grads_dtype: Literal["fp32", "bf16"] = flag("fp32",
        "Type in which the gradients of an iteration add up and are reduced.")
    exp_avg_dtype: MomentType = flag("fp32",
        "Type in which Adam's first moment is kept; it is updated in fp32.")
    exp_avg_sq_dtype: MomentType = flag("fp32",
        "Type in which Adam's second moment is kept; it is updated in fp32. bf16 cannot resolve "
        "the changes of the default --adam-beta2.")
    fp32_residual_connection: bool = flag(False,
        "Keep the residual stream, and the tensors between stages, in fp32.",
        idle_without="--bf16 or --fp16")
