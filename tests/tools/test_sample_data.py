"""tools/sample_data.py says how far it is."""

import time

import pytest

from tools.sample_data import Reporter


def test_a_stage_that_prints_nothing_says_how_long_it_has_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Reporter(tell_every=0.05) as report:
        report("training the tokenizer", 0, None)
        time.sleep(0.4)
    first, second, *_ = capfd.readouterr().err.splitlines()
    assert first == "training the tokenizer"
    assert second == "training the tokenizer: 0 s so far"


def test_a_stage_that_prints_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with Reporter(tell_every=30) as report:
        for done in range(0, 101, 5):
            report("tokenising", done, 100)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"tokenising: {tenth} %" for tenth in range(0, 101, 10)]
