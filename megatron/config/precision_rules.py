"""The rules about the loss scale, and notes on those of its flags that are idle."""

from collections.abc import Callable, Iterator
from typing import Final

from megatron.config.flags import Flags


def _least_scale(flags: Flags) -> Iterator[str]:
    precision = flags.precision
    if not precision.fp16 or precision.loss_scale is not None:
        return
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield (
            f"--min-loss-scale {precision.min_loss_scale:g} is above --initial-loss-scale "
            f"{precision.initial_loss_scale:g}: lower it"
        )


def _idle_check(flags: Flags) -> Iterator[str]:
    precision = flags.precision
    checks_nothing = flags.guard.no_check_for_nan_in_loss_and_grad
    if checks_nothing and precision.fp16 and precision.loss_scale is None:
        yield (
            "--no-check-for-nan-in-loss-and-grad changes nothing: a loss scale that changes is "
            "found by overflows, which therefore never end a run with --fp16"
        )


PRECISION_RULES: Final[tuple[Callable[[Flags], Iterator[str]], ...]] = (_least_scale,)
"""The mistakes that they find make a run impossible."""

PRECISION_NOTES: Final[tuple[Callable[[Flags], Iterator[str]], ...]] = (_idle_check,)
"""The flags that they find change nothing beside the others."""
