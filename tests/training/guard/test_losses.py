"""Spikes and iterations without a step are told with their samples."""

import math
from dataclasses import replace

import pytest

from megatron.run.guard import GuardSettings
from megatron.training.guard.losses import LossWatch
from megatron.training.step import Finished


def finished(number: int, loss: float, is_skipped: bool = False) -> Finished:
    samples = range(4 * number, 4 * number + 4)
    return Finished(number, loss, 1.0, 4 * number + 4, samples=samples, is_skipped=is_skipped)


def remarks(losses: list[float], tells_spikes: bool = True) -> dict[int, str]:
    """What is said about each iteration, counted from 1, that is remarkable."""
    watch = LossWatch(GuardSettings(check_for_spiky_loss=tells_spikes))
    said = {}
    for number, loss in enumerate(losses):
        for line in watch.remarks(finished(number, loss, not math.isfinite(loss))):
            said[number + 1] = line
    return said


@pytest.mark.parametrize(
    ("losses", "spiky"),
    [
        ([9.0, 4.0, 89.0, 3.0], []),
        ([9.0, 4.0, 90.0, 3.0], [3]),
        ([9.0, 90.0, 900.0, 91.0, 89.0], [2, 3, 4]),
        ([0.0, 5.0, 49.0], []),
        ([0.0], []),
    ],
)
def test_a_spike_is_ten_times_the_largest_loss_that_was_none(
    losses: list[float], spiky: list[int]
) -> None:
    assert list(remarks(losses)) == spiky
    assert not remarks(losses, tells_spikes=False)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_large_gradient_norm_is_told_by_itself(is_told: bool) -> None:
    """Spikes of the loss and of the norm are counted apart; an overflow is none."""
    watch = LossWatch(GuardSettings(check_for_large_grads=is_told))
    said = [
        line
        for number, norm in enumerate((2.0, math.inf, 19.0, 190.0, 180.0))
        for line in watch.remarks(replace(finished(number, 10.0**number), grad_norm=norm))
    ]
    assert (
        said
        == [
            "iteration 4: grad norm 1.900000E+02 is at least 10 times the largest before it, "
            "1.900000E+01; samples 12-15"
        ][: 1 if is_told else 0]
    )


def test_remarks_name_iteration_values_and_samples() -> None:
    said = remarks([2.0, math.nan, 30.0])
    assert said[2] == "iteration 2: lm loss nan, grad norm 1.0: no step was taken; samples 4-7"
    assert said[3] == (
        "iteration 3: lm loss 3.000000E+01 is at least 10 times the largest before it, "
        "2.000000E+00; samples 8-11"
    )


def test_an_overflow_is_told_with_the_next_loss_scale() -> None:
    overflown = replace(finished(1, 2.5, is_skipped=True), loss_scale=2.0**20)
    (said,) = LossWatch(GuardSettings()).remarks(overflown)
    assert said == (
        "iteration 2: lm loss 2.5, grad norm 1.0: no step was taken; samples 4-7; the loss scale "
        "is 1048576.0 now"
    )


def test_an_iteration_that_is_not_final_is_no_news() -> None:
    assert list(LossWatch(GuardSettings(check_for_spiky_loss=True)).remarks(None)) == []
