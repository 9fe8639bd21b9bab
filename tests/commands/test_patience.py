"""A start that takes long says what it does."""

import time

import pytest

from megatron.commands.patience import telling


def test_rank_0_says_what_takes_long(capfd: pytest.CaptureFixture[str]) -> None:
    with telling("the packages", first=0.05, tell_every=0.05, environment={"RANK": "0"}):
        time.sleep(0.3)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert set(lines) == {"starting: 0 s so far for the packages"}
    time.sleep(0.1)
    assert capfd.readouterr().err == "", "it is silent afterwards"


@pytest.mark.parametrize(("rank", "pause"), [("1", 0.2), ("0", 0.0), ("", 0.2)])
def test_other_ranks_and_quick_starts_are_silent(
    rank: str, pause: float, capfd: pytest.CaptureFixture[str]
) -> None:
    with telling("the packages", first=0.05, tell_every=0.05, environment={"RANK": rank}):
        time.sleep(pause)
    assert capfd.readouterr().err == ""
