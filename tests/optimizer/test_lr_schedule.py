"""The rates of a step against Megatron-Core's own scheduler, and against tables made by hand."""

import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron.optimizer.lr_schedule import Rates, learning_rate, rates
from megatron.optimizer.settings import OptimizerSettings

WARMUP, DECAY = 40, 240  # samples
PEAK, FLOOR, START = 1.0, 0.2, 0.1

MEGATRON: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "megatron_rates.json").read_text("utf-8")
)["cases"]
"""Random settings with the samples, both learning rates and the weight decay of every step, as the
``OptimizerParamScheduler`` of the release named in the file gives them."""


@pytest.mark.parametrize("case", MEGATRON, ids=range(len(MEGATRON)))
def test_every_step_has_megatrons_rates(case: dict[str, Any]) -> None:
    config = OptimizerSettings(**case["config"])
    for samples, lr, vocabulary_lr, decay in case["rates"]:
        ours = rates(config, samples)
        assert ours.lr == learning_rate(config, samples)
        assert [ours.lr, ours.vocabulary_lr, ours.weight_decay] == pytest.approx(
            [lr, vocabulary_lr, decay], rel=1e-12, abs=1e-18
        ), samples


def test_megatrons_rates_are_of_every_style() -> None:
    """What the comparison rests on: settings that differ where they should."""
    configs = [case["config"] for case in MEGATRON]
    styles = {config["lr_decay_style"] for config in configs}
    assert styles == {"constant", "linear", "cosine", "inverse-square-root", "WSD"}
    annealed = {c["lr_wsd_decay_style"] for c in configs if c["lr_decay_style"] == "WSD"}
    assert annealed == {"linear", "cosine", "exponential", "minus_sqrt"}
    assert {c["weight_decay_incr_style"] for c in configs} == {"constant", "linear", "cosine"}
    assert {c["decoupled_min_lr"] is None for c in configs if c["decoupled_lr"]} == {True, False}


def config(
    style: Literal["linear", "cosine", "constant"], warmup: int = WARMUP
) -> OptimizerSettings:
    return OptimizerSettings(
        lr=PEAK,
        min_lr=FLOOR,
        lr_decay_style=style,
        lr_decay_samples=DECAY,
        lr_warmup_samples=warmup,
        lr_warmup_init=START,
    )


WARM = {0: 0.1, 10: 0.325, 20: 0.55, 40: 1.0}
LINEAR = {90: 0.8, 140: 0.6, 190: 0.4, 240: 0.2, 241: 0.2, 10_000: 0.2}
COSINE = {
    90: 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2,
    140: 0.6,
    190: 0.2 + 0.8 * (1 - math.sqrt(0.5)) / 2,
    240: 0.2,
    10_000: 0.2,
}
CONSTANT = {41: 1.0, 240: 1.0, 10_000: 1.0}


@pytest.mark.parametrize(
    ("style", "table"),
    [("linear", WARM | LINEAR), ("cosine", WARM | COSINE), ("constant", WARM | CONSTANT)],
)
def test_matches_the_table(
    style: Literal["linear", "cosine", "constant"], table: dict[int, float]
) -> None:
    for samples, rate in table.items():
        assert learning_rate(config(style), samples) == pytest.approx(rate, rel=1e-12), samples


@pytest.mark.parametrize("style", ["linear", "cosine", "constant"])
def test_without_warmup_the_first_iteration_uses_the_peak(
    style: Literal["linear", "cosine", "constant"],
) -> None:
    assert learning_rate(config(style, warmup=0), 0) == PEAK


def test_all_weights_have_one_rate_unless_it_is_decoupled() -> None:
    plain = OptimizerSettings(lr=1.0, lr_decay_samples=10, weight_decay=0.3)
    assert rates(plain, 5) == Rates(0.5, 0.5, 0.3)
