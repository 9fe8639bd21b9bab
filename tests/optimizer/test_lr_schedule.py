"""The learning rate against tables worked out by hand."""

import math
from typing import Literal

import pytest

from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.lr_schedule import learning_rate

WARMUP, DECAY = 40, 240  # samples
PEAK, FLOOR, START = 1.0, 0.2, 0.1


def config(style: Literal["linear", "cosine", "constant"], warmup: int = WARMUP) -> OptimizerConfig:
    return OptimizerConfig(
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
