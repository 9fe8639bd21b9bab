"""Rules about the loss scale and the types of gradients and moments; notes on idle flags."""

from collections.abc import Iterator
from typing import Final

from megatron.config.declare import Flags, Rule, option_of
from megatron.config.flags import LogFlags, TrainFlags
from megatron.config.long_run_flags import GuardFlags
from megatron.config.optimizer_flags import OptimizerFlags
from megatron.config.precision_flags import PrecisionFlags

NEEDS_16_BITS: Final = "--dry-run counts FLOPs and bytes of 16-bit numbers: add --bf16 or --fp16"
"""What a dry run in fp32 is told."""

_TYPES: Final = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def _least_scale(flags: Flags) -> Iterator[str]:
    precision = flags[PrecisionFlags]
    if not precision.fp16 or precision.loss_scale is not None:
        return
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield (
            f"--min-loss-scale {precision.min_loss_scale:g} is above --initial-loss-scale "
            f"{precision.initial_loss_scale:g}: lower it"
        )


def _narrow_types(flags: Flags) -> Iterator[str]:
    """Megatron asks for the flag that allows them, and for Adam."""
    precision = flags[PrecisionFlags]
    narrow = [name for name in _TYPES if getattr(precision, name) != "fp32"]
    if narrow and not precision.use_precision_aware_optimizer:
        for name in narrow:
            yield (
                f"{option_of(name)} {getattr(precision, name)} needs "
                "--use-precision-aware-optimizer, as in Megatron: add it, or use fp32"
            )
    elif narrow and flags[OptimizerFlags].optimizer != "adam":
        yield (
            f"{option_of(narrow[0])} {getattr(precision, narrow[0])} does not go with --optimizer "
            f"{flags[OptimizerFlags].optimizer}, whose states are fp32: use fp32, or --optimizer "
            "adam"
        )
    if precision.main_grads_dtype == "bf16" and not (flags[TrainFlags].bf16 or precision.fp16):
        yield (
            "--main-grads-dtype bf16: gradients are as exact as the activations, which are fp32: "
            "add --bf16 or --fp16, or use fp32"
        )


def _counted_type(flags: Flags) -> Iterator[str]:
    """The dry run's costs are those of 16 bits."""
    if flags[LogFlags].dry_run and not (flags[TrainFlags].bf16 or flags[PrecisionFlags].fp16):
        yield NEEDS_16_BITS


def _idle_awareness(flags: Flags) -> Iterator[str]:
    precision = flags[PrecisionFlags]
    is_idle = all(getattr(precision, name) == "fp32" for name in _TYPES)
    if precision.use_precision_aware_optimizer and is_idle:
        yield (
            "--use-precision-aware-optimizer changes nothing: --main-grads-dtype, --exp-avg-dtype "
            "and --exp-avg-sq-dtype are fp32"
        )


def _idle_check(flags: Flags) -> Iterator[str]:
    precision = flags[PrecisionFlags]
    checks_nothing = flags[GuardFlags].no_check_for_nan_in_loss_and_grad
    if checks_nothing and precision.fp16 and precision.loss_scale is None:
        yield (
            "--no-check-for-nan-in-loss-and-grad changes nothing: a loss scale that changes is "
            "found by overflows, which therefore never end a run with --fp16"
        )


PRECISION_RULES: Final[tuple[Rule, ...]] = (
    _least_scale,
    _narrow_types,
    _counted_type,
)
"""The mistakes that they find make a run impossible."""

PRECISION_NOTES: Final[tuple[Rule, ...]] = (
    _idle_check,
    _idle_awareness,
)
"""The flags that they find change nothing beside the others."""
