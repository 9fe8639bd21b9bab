"""The last screen says what was measured, what is predicted, and from what."""

from dataclasses import replace

import pytest

from megatron.planning.other_treatment import Prediction
from megatron.training.metrics.last_screen import WIDTH, LastScreen, screen_lines

SPLIT = Prediction("none", own=1.9, other=3.4, idle=0.44, output_layer=0.35, at_best=False)
SCREEN = LastScreen(
    "vocab-2",
    "1f1b",
    2,
    seconds=2.25,
    timed=(4, 30),
    recorded=range(26, 31),
    idle=0.123,
    passes=2.0,
    predicted=SPLIT,
    files=("checkpoints in /tmp/run",),
    further=("--vocab-parallel none runs the predicted job",),
)


def test_both_jobs_stand_in_one_table() -> None:
    """The other job takes 2.25 + (3.4 - 1.9) s: as much longer as the simulator says."""
    rule, heading, *rows = screen_lines(SCREEN)
    assert rows[-1] == rule == "-" * WIDTH
    assert heading.split() == ["the", "run", "in", "short", "s", "an", "iteration", "idle"]
    assert rows[0].split()[-2:] == ["2.25", "12.3%"]
    assert rows[1].split()[-2:] == ["3.75", "44.0%"]
    assert rows[0].startswith(" measured: vocab-2, vocabulary split over 2 ranks ")
    assert rows[1].startswith(" predicted: none, vocabulary on the first and last stage ")
    assert len(heading) == len(rows[0]) == len(rows[1])


def text(screen: LastScreen) -> str:
    lines = list(screen_lines(screen))
    assert max(map(len, lines)) <= WIDTH
    return " ".join(" ".join(lines).split())


def test_it_says_from_what_it_predicts() -> None:
    told = text(SCREEN)
    assert "the median of 27 iterations, 4 to 30; schedule 1f1b" in told
    assert "the mean of the ranks in 5 iterations, 26 to 30" in told
    assert "with the work of S and T of all ranks (350 ms a microbatch) on the last stage" in told
    assert "Of this run it gives the passes 1.9 s, measured 2 s; of the other 3.4 s" in told
    assert "files: checkpoints in /tmp/run" in told
    assert "next: --vocab-parallel none runs the predicted job" in told


def test_a_bound_is_called_a_bound() -> None:
    found = replace(SPLIT, treatment="vocab-2", at_best=True)
    told = text(replace(SCREEN, treatment="none", predicted=found))
    assert "measured: none, vocabulary on the first and last stage" in told
    assert "predicted: vocab-2, vocabulary split over 2 ranks" in told
    assert "the last stage less its layers" in told
    assert "count as free, so it is a lower bound" in told


@pytest.mark.parametrize(("reason", "said"), [("there is no reason", True), ("", False)])
def test_without_a_prediction_there_is_the_reason(reason: str, said: bool) -> None:
    told = text(replace(SCREEN, predicted=None, unpredicted=reason))
    assert ("is not predicted: there is no reason" in told) == said
    assert "predicted: none" not in told


def test_a_run_that_has_timed_no_pass_tells_its_seconds_only() -> None:
    told = text(replace(SCREEN, predicted=None, idle=None, recorded=(), pipeline_size=1))
    assert "vocabulary on the only stage 2.25 time:" in told
    assert "idle:" not in told
