"""Types of activations, gradients and moments, and the loss scale."""

from collections.abc import Iterator

import torch

from megatron.flags.groups import Flags
from megatron.flags.rules import notes, refuses
from megatron.optimizer.settings import LossScaleSettings
from megatron.run.dry_run import DryRunSettings
from megatron.run.guard import GuardSettings
from megatron.run.precision import NEEDS_16_BITS, PrecisionSettings, loss_scale_of, narrow_types


@notes
def _idle_check(flags: Flags) -> Iterator[str]:
    precision = flags[PrecisionSettings]
    checks_nothing = flags[GuardSettings].no_check_for_nan_in_loss_and_grad
    if checks_nothing and precision.fp16 and flags[LossScaleSettings].loss_scale is None:
        yield (
            "--no-check-for-nan-in-loss-and-grad changes nothing: a loss scale that changes is "
            "found by overflows, which therefore never end a run with --fp16"
        )


@refuses
def _least_scale(flags: Flags) -> Iterator[str]:
    scale = loss_scale_of(flags)
    if scale is None or scale.loss_scale is not None:
        return
    if scale.min_loss_scale > scale.initial_loss_scale:
        yield (
            f"--min-loss-scale {scale.min_loss_scale:g} is above --initial-loss-scale "
            f"{scale.initial_loss_scale:g}: lower it"
        )


@refuses
def _narrow_types(flags: Flags) -> Iterator[str]:
    """Refuse 16 bits without --use-precision-aware-optimizer, which Megatron demands too.

    Gradients in bf16 are also refused if activations are fp32.
    """
    precision = flags[PrecisionSettings]
    narrow = narrow_types(flags)
    if narrow and not precision.use_precision_aware_optimizer:
        for given in narrow:
            yield (
                f"{given} needs --use-precision-aware-optimizer, as in Megatron: add it, or use "
                "fp32"
            )
    if precision.main_grads_dtype == "bf16" and not (precision.bf16 or precision.fp16):
        yield (
            "--main-grads-dtype bf16: gradients are as exact as the activations, which are fp32: "
            "add --bf16 or --fp16, or use fp32"
        )


@refuses
def _counted_type(flags: Flags) -> Iterator[str]:
    """Refuse a dry run in fp32, because its costs are costs of 16-bit numbers."""
    if flags[DryRunSettings].dry_run and flags[PrecisionSettings].dtype == torch.float32:
        yield NEEDS_16_BITS


@notes
def _idle_awareness(flags: Flags) -> Iterator[str]:
    precision = flags[PrecisionSettings]
    if precision.use_precision_aware_optimizer and not narrow_types(flags):
        yield (
            "--use-precision-aware-optimizer changes nothing: --main-grads-dtype, --exp-avg-dtype "
            "and --exp-avg-sq-dtype are fp32"
        )
