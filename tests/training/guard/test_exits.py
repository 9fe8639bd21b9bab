"""All ranks leave after the same iteration, though one alone has a reason."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from correctness.rank_runs import make_pipeline_groups
from harness.rank_pool import RankPool

from megatron.parallel.groups import ConnectedAxis
from megatron.run.guard import GuardSettings
from megatron.training.exit_signals import ExitSignals, was_terminated
from megatron.training.guard.exits import AgreedExit

ALONE = ConnectedAxis("world", 0, (0,))


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers of signals are those of before at the end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_is_noted_once_the_handler_is_there() -> None:
    signals = ExitSignals(("SIGUSR1",))
    assert not signals.received
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.received == {signal.SIGUSR1}
    assert not was_terminated()


def test_a_sigterm_that_was_only_noted_is_remembered() -> None:
    ExitSignals(("SIGTERM",))
    assert not was_terminated()
    os.kill(os.getpid(), signal.SIGTERM)
    assert was_terminated()


def test_a_single_rank_leaves_at_once() -> None:
    config = GuardSettings(exit_signal_handler=True, exit_duration_in_mins=60.0)
    signals = ExitSignals(config.exit_signals)
    agreed = AgreedExit(config, signals, time.monotonic(), ALONE)
    assert agreed.decide() == (None, False)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert agreed.decide()[0] == "after SIGUSR1 (--exit-signal-handler)"
    agreed.close()


def test_the_time_counts_from_the_begin_of_the_process() -> None:
    config = GuardSettings(exit_duration_in_mins=1.5)
    begin = time.monotonic() - 100.0
    reason, _ = AgreedExit(config, ExitSignals(), begin, ALONE).decide()
    assert reason == "after 1.5 minutes (--exit-duration-in-mins)"


def leave(rank: int, world_size: int, *, odd: int, seconds: float | None) -> list[str | None]:
    """Five iterations; rank ``odd`` gets a signal in the second, or has begun earlier."""
    hosts = make_pipeline_groups().world_hosts
    names = () if seconds else ("SIGUSR1",)
    config = GuardSettings(
        exit_signal_handler=bool(names), exit_duration_in_mins=seconds and seconds / 60
    )
    before = signal.getsignal(signal.SIGUSR1)
    signals = ExitSignals(names)
    begin = time.monotonic() - (2 * (seconds or 0.0) if rank == odd else 0.0)
    agreed = AgreedExit(config, signals, begin, hosts)
    reasons = []
    for iteration in range(5):
        if iteration == 1 and rank == odd and not seconds:
            os.kill(os.getpid(), signal.SIGUSR1)
        reasons.append(agreed.decide()[0])
    agreed.close()
    signal.signal(signal.SIGUSR1, before)
    return reasons


@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_agree_one_iteration_after_the_signal(odd: int, ranks: RankPool) -> None:
    results = ranks.run(leave, 3, odd=odd, seconds=None)
    after = "after SIGUSR1 (--exit-signal-handler)"
    assert results == [[None, None, after, after, after]] * 3


def test_ranks_agree_on_the_time(ranks: RankPool) -> None:
    results = ranks.run(leave, 2, odd=1, seconds=3600.0)
    assert results == [[None, *["after 60 minutes (--exit-duration-in-mins)"] * 4]] * 2


def test_a_run_that_no_signal_and_no_time_ends_exchanges_nothing() -> None:
    """The axis has no group here, so an exchange would fail."""
    unconnected = ConnectedAxis("world", 0, (0, 1))
    agreed = AgreedExit(GuardSettings(), ExitSignals(), time.monotonic(), unconnected)
    assert agreed.decide() == (None, False)
    agreed.close()


def test_a_file_ends_the_run_as_long_as_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "stop"
    agreed = AgreedExit(
        GuardSettings(kill_switch_path=file), ExitSignals(), time.monotonic(), ALONE
    )
    assert agreed.decide() == (None, False)
    file.touch()
    reason = f"because {file} is there (--kill-switch-path)"
    assert [agreed.decide(), agreed.decide()] == [(reason, False)] * 2


def test_triggers_work_once_each(tmp_path: Path) -> None:
    config = GuardSettings(trigger_path=tmp_path)
    agreed = AgreedExit(config, ExitSignals(), time.monotonic(), ALONE)
    assert agreed.decide() == (None, False)
    (tmp_path / "save").touch()
    assert [agreed.decide(), agreed.decide()] == [(None, True), (None, False)]
    (tmp_path / "exit").touch()
    reason = f"because {tmp_path} had a file exit (--trigger-path)"
    assert [agreed.decide(), agreed.decide()] == [(reason, False), (None, False)]
    assert not list(tmp_path.iterdir())


def look(rank: int, world_size: int, *, folder: Path) -> list[tuple[str | None, bool]]:
    """Three iterations; a file asks for a save before the first."""
    hosts = make_pipeline_groups().world_hosts
    agreed = AgreedExit(GuardSettings(trigger_path=folder), ExitSignals(), time.monotonic(), hosts)
    decided = [agreed.decide() for _ in range(3)]
    agreed.close()
    return decided


def test_ranks_save_after_the_same_iteration(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "save").touch()
    assert ranks.run(look, 2, folder=tmp_path) == [[(None, False), (None, True), (None, False)]] * 2
