"""Spans of the learning rate in iterations, beside batches that grow.

The samples that a run has consumed after every iteration are listed by hand, by Megatron-LM's rule.
"""

from itertools import accumulate

import pytest

from megatron.optimizer.lr_schedule import learning_rate, weight_decay
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig

BASE = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 "
    "--global-batch-size 8 --device cpu --mock-data --vocab-size 99 --lr 1e-2 --train-iters 14"
)
RAMPUP = "--rampup-batch-size 2 2 24"
"""8 samples for each of the sizes 2, 4 and 6; a size begins when these samples are consumed."""
STEPS = "--batch-size-steps 0:2 24:8"
TOKENS = "--step-batch-size-schedule 0:2,192:8"
"""The same steps in tokens, for 8 tokens in a sample."""

SIZES = {
    RAMPUP: [2, 2, 2, 2, 4, 4, 6, 6, 8, 8, 8, 8, 8, 8],
    STEPS: [2] * 12 + [8] * 2,
    TOKENS: [2] * 12 + [8] * 2,
    "": [8] * 14,
}
"""Samples of every iteration."""

growing = pytest.mark.parametrize("growth", SIZES, ids=lambda growth: growth.split(" ")[0])


def made(growth: str, flags: str) -> RunConfig:
    return parse(f"{BASE} {growth} {flags}".split(), world_size=1)


def rates(growth: str, flags: str) -> list[float]:
    """The rate of every step, and of the step that would follow the last one."""
    optimizer = made(growth, flags).optimizer
    return [learning_rate(optimizer, done) for done in accumulate(SIZES[growth], initial=0)]


@growing
def test_the_last_iterations_of_wsd_fall_to_the_end(growth: str) -> None:
    wsd = "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 5"
    annealed = SIZES[growth][9:]
    falls = [1 - done / sum(annealed) for done in accumulate(annealed, initial=0)]
    expected = [1e-2] * 9 + [1e-2 * share for share in falls]
    for decay in ("", "--lr-decay-iters 14"):
        assert rates(growth, f"{wsd} {decay}") == pytest.approx(expected, abs=1e-17)


@growing
def test_a_decay_ends_with_its_last_iteration(growth: str) -> None:
    found = rates(growth, "--lr-decay-style linear --lr-decay-iters 10 --min-lr 1e-4")
    decayed = sum(SIZES[growth][:10])
    falls = [1 - done / decayed for done in accumulate(SIZES[growth][:10], initial=0)]
    assert found[:11] == pytest.approx([1e-4 + share * (1e-2 - 1e-4) for share in falls])
    assert found[10:] == pytest.approx([1e-4] * 5)


@growing
def test_the_rate_is_at_its_peak_after_the_warm_up(growth: str) -> None:
    found = rates(growth, "--lr-decay-style constant --lr-warmup-iters 4")
    warm = sum(SIZES[growth][:4])
    rises = [1e-2 * done / warm for done in accumulate(SIZES[growth][:4], initial=0)]
    assert found == pytest.approx(rises + [1e-2] * 10)


@growing
def test_a_warm_up_shorter_than_the_decay_is_accepted(growth: str) -> None:
    found = rates(growth, "--lr-decay-style cosine --lr-warmup-iters 10")
    assert found[10] == pytest.approx(1e-2)
    assert found[11] < 1e-2
    assert found[14] == pytest.approx(0, abs=1e-17)
    with pytest.raises(ValueError, match="--lr-warmup-iters 14: the warm-up of"):
        made(growth, "--lr-decay-style cosine --lr-warmup-iters 14")


@growing
def test_the_weight_decay_grows_to_the_last_iteration(growth: str) -> None:
    incr = "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1"
    optimizer, total = made(growth, incr).optimizer, sum(SIZES[growth])
    for done in accumulate(SIZES[growth], initial=0):
        assert weight_decay(optimizer, done) == pytest.approx(done / total)


@growing
def test_an_annealing_longer_than_the_decay_is_refused(growth: str) -> None:
    message = "--lr-wsd-decay-iters 11 is longer than the decay of 10 iterations"
    with pytest.raises(ValueError, match=message):
        made(growth, "--lr-decay-style WSD --lr-wsd-decay-iters 11 --lr-decay-iters 10")
    flags = "--lr-decay-style WSD --lr-wsd-decay-iters 10 --lr-decay-iters 10"
    assert made(growth, flags).optimizer.lr_wsd_decay_samples == sum(SIZES[growth][:10])


def test_an_annealing_in_samples_is_shorter_than_the_decay_too() -> None:
    flags = BASE.replace("--train-iters 14", "--train-samples 100 --lr-decay-style WSD")
    message = "--lr-wsd-decay-samples 101 is longer than the decay of 100 samples"
    with pytest.raises(ValueError, match=message):
        parse(f"{flags} --lr-wsd-decay-samples 101".split(), world_size=1)


@pytest.mark.parametrize("growth", [RAMPUP, STEPS])
def test_a_run_may_end_before_a_batch_has_its_full_size(growth: str) -> None:
    flags = BASE.replace("--train-iters 14", f"--train-samples 4 {growth}")
    assert parse(flags.split(), world_size=1).train.train_iters == 2
    with pytest.raises(ValueError, match="--train-samples 1 is less than one iteration of 2 sam"):
        parse(flags.replace("--train-samples 4", "--train-samples 1").split(), world_size=1)
