"""Both ends of the range of every number of the model and the optimizer train with finite losses.

So a range ends before its numbers make activations, losses or gradients overflow. The second of two
iterations reads the weights after a step.
"""

import math
from typing import Final

import pytest
from correctness.rank_runs import RankRun, train_on_rank
from harness.rank_pool import RankError, RankPool
from reference.plain_loss import RandomMicrobatch
from run.extremes import line_with, takes_whole

from megatron.checkpoint.settings import UpcyclingSettings
from megatron.flags.groups import declarations
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.optimizer.rate_span_settings import RateSpanSettings
from megatron.optimizer.settings import LossScaleSettings, MuonSettings, OptimizerSettings
from megatron.parallel.settings import ExpertRankSettings
from megatron.run.command_line import parse
from megatron.run.model import MODEL_GROUPS
from megatron.run.precision import PrecisionSettings

_GROUPS: Final = (
    *MODEL_GROUPS,
    UpcyclingSettings,
    ExpertRankSettings,
    PrecisionSettings,
    EightBitSettings,
    OptimizerSettings,
    MuonSettings,
    LossScaleSettings,
    RateSpanSettings,
)
_WHOLE: Final = ("--fp8-margin", "--fp8-amax-history-len", "--muon-num-ns-steps", "--hysteresis")
"""Flags with whole numbers that are neither sizes nor spans, which rules compare with others."""

_OVERFLOWS: Final = ("--loss-scale", 2.0**40)
"""A scale that only large batches need, and that never changes: a run of small ones says so."""

_RUN: Final = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --vocab-size 37 "
    "--mock-data --device cpu --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --make-vocab-size-divisible-by 4"
)


def cases() -> list[tuple[str, str]]:
    """Return the flags with an effect on numbers, each with both ends of its range."""
    found = [own for group in _GROUPS for own in declarations(group) if own.facts.range]
    ends = [
        (own.option, repr(int(end) if takes_whole(own) else float(end)))
        for own in found
        if own.facts.range and (own.kind is not int or own.option in _WHOLE)
        for end in (own.facts.range.least, own.facts.range.most)
    ]
    return [(option, word) for option, word in ends if is_right(option, word)]


def is_right(option: str, word: str) -> bool:
    """Return whether no rule refuses an end of a range beside the other flags."""
    try:
        parse(line_with(option, word, _RUN), 1, speak=False)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("option", "word"), cases())
@pytest.mark.one_in(12)
def test_both_ends_of_a_range_train(ranks: RankPool, option: str, word: str) -> None:
    config = parse(line_with(option, word, _RUN), 1, speak=False)
    batches = [
        [RandomMicrobatch.draw(37, 1, 16, seed=10 * iteration + number) for number in range(2)]
        for iteration in range(2)
    ]
    if (option, float(word)) == _OVERFLOWS:
        with pytest.raises(RankError, match="the forward is finite, the gradient is not"):
            ranks.run(train_on_rank, 1, config=config, batches=batches)
        return
    runs: list[RankRun] = ranks.run(train_on_rank, 1, config=config, batches=batches)
    losses, norms = runs[0].losses, runs[0].gradient_norms
    assert len(losses) == 2
    assert all(map(math.isfinite, losses)), (losses, norms)
