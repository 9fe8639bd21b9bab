"""The loss scale changes by Megatron-LM's rule, which a few runs by hand show."""

import json
from dataclasses import replace

import pytest

from megatron.optimizer.loss_scaler import LossScale, LossScaler
from megatron.optimizer.settings import LossScaleSettings

SLOW = LossScaleSettings(initial_loss_scale=16, hysteresis=2, loss_scale_window=3)

BY_HAND = [
    # overflows (x) and steps (.), and the scale after each
    (SLOW, "xxx.x...", [16, 8, 4, 4, 2, 2, 2, 4]),
    (SLOW, "x...x.x.", [16, 16, 16, 32, 32, 32, 16, 16]),
    (
        LossScaleSettings(initial_loss_scale=16, hysteresis=1, loss_scale_window=2),
        "x...x..",
        [8, 8, 16, 16, 8, 8, 16],
    ),
    (
        LossScaleSettings(initial_loss_scale=16, hysteresis=3, loss_scale_window=9),
        "x.x.x.x",
        [16, 16, 16, 16, 8, 8, 4],
    ),
    (
        LossScaleSettings(
            initial_loss_scale=5, min_loss_scale=2, hysteresis=1, loss_scale_window=1
        ),
        "xxx.",
        [2.5, 2, 2, 4],
    ),
    (LossScaleSettings(loss_scale=7, loss_scale_window=1, hysteresis=1), "x.x.", [7, 7, 7, 7]),
]


@pytest.mark.parametrize(("config", "outcomes", "scales"), BY_HAND)
def test_scale_follows_the_rule(
    config: LossScaleSettings, outcomes: str, scales: list[float]
) -> None:
    scaler, found = LossScaler(config), []
    for outcome in outcomes:
        scaler.update(outcome == ".", samples=4)
        found.append(scaler.state.scale)
    assert found == scales
    assert scaler.state.samples_without_step == 4 * outcomes.count("x")


def test_defaults_are_those_of_megatron() -> None:
    scaler = LossScaler(LossScaleSettings())
    assert scaler.state.scale == 2**32
    for _ in range(999):
        scaler.update(True, samples=1)
    assert scaler.state.scale == 2**32
    scaler.update(True, samples=1)
    assert scaler.state.scale == 2**33
    for expected in (2**33, 2**32, 2**31):
        scaler.update(False, samples=1)
        assert scaler.state.scale == expected


def test_a_look_ahead_changes_nothing() -> None:
    scaler = LossScaler(LossScaleSettings(initial_loss_scale=4, loss_scale_window=1))
    before = scaler.state
    assert scaler.after(True, samples=1).scale == 8
    assert scaler.state == before


@pytest.mark.parametrize("cut", range(7))
def test_a_scaler_that_is_saved_goes_on_alike(cut: int) -> None:
    config, outcomes = (
        LossScaleSettings(initial_loss_scale=16, hysteresis=2, loss_scale_window=3),
        "xx..x..",
    )
    whole, first, second = (LossScaler(config) for _ in range(3))
    for number, outcome in enumerate(outcomes):
        whole.update(outcome == ".", samples=2)
        if number < cut:
            first.update(outcome == ".", samples=2)
    second.load(json.loads(json.dumps(first.saved())))
    for outcome in outcomes[cut:]:
        second.update(outcome == ".", samples=2)
    assert second.state == whole.state


def test_without_fp16_only_samples_without_a_step_are_counted() -> None:
    scaler = LossScaler(None)
    scaler.update(False, samples=3)
    scaler.update(True, samples=3)
    assert not scaler.is_active
    assert scaler.state == LossScale(1.0, 0, 1, samples_without_step=3)
    assert scaler.saved() == {"samples_without_step": 3}
    again = LossScaler(None)
    again.load(scaler.saved())
    assert again.state == scaler.state


@pytest.mark.parametrize("config", [None, SLOW, LossScaleSettings(loss_scale=7)])
def test_an_iteration_that_is_passed_over_changes_no_scale(
    config: LossScaleSettings | None,
) -> None:
    scaler = LossScaler(config)
    before = scaler.state
    scaler.pass_over(5)
    assert scaler.state == replace(before, samples_without_step=5)


def test_samples_are_counted_on_whether_or_not_a_run_scales_losses() -> None:
    scaled, plain = LossScaler(SLOW), LossScaler(None)
    scaled.update(False, samples=5)
    plain.load(scaled.saved())
    plain.pass_over(2)
    assert plain.state == LossScale(1.0, 0, 1, samples_without_step=7)
    for saved, with_scale, counted in ((plain.saved(), True, 7), (scaled.saved(), False, 5)):
        scaler = LossScaler(SLOW)
        scaler.load(saved, with_scale=with_scale)
        assert scaler.state == replace(LossScaler(SLOW).state, samples_without_step=counted)


def test_scales_are_loaded_where_they_change_only() -> None:
    changing, constant = (
        LossScaler(LossScaleSettings()),
        LossScaler(LossScaleSettings(loss_scale=8)),
    )
    changing.update(False, samples=5)
    constant.load(changing.saved())
    assert (constant.state.scale, constant.state.samples_without_step) == (8, 5)
    before = changing.state
    changing.load(None)  # of a run that counted nothing
    assert changing.state == before
