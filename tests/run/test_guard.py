"""What guards a run, from its flags; and what is said where they do less than they promise."""

import pytest

from megatron.run.command_line import parse
from megatron.run.guard import GuardSettings
from megatron.run.run_config import RunConfig

MOCK = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 10 --device cpu --mock-data --vocab-size 99"
)


@pytest.fixture(autouse=True)
def no_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)


def run(flags: str) -> RunConfig:
    return parse(f"{MOCK} {flags}".split(), world_size=1)


def test_without_its_flags_a_run_ends_where_a_loss_is_not_finite_or_nothing_moves() -> None:
    assert run("").guard == GuardSettings()
    assert run("").notes == ()


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ("", {}),
        ("--exit-signal-handler", {"exit_signals": ("SIGTERM", "SIGUSR1")}),
        (
            "--exit-signal-handler --exit-signal SIGUSR2",
            {"exit_signals": ("SIGTERM", "SIGUSR1", "SIGUSR2")},
        ),
        ("--exit-signal SIGUSR2", {}),
        ("--exit-duration-in-mins 0.5", {"exit_duration_in_mins": 0.5}),
        ("--check-for-nan-in-loss-and-grad", {}),
        ("--iterations-to-skip 3 5 3", {"iterations_to_skip": (3, 5, 3)}),
    ],
)
def test_what_flags_come_to(flags: str, changed: dict[str, object]) -> None:
    found, usual = run(flags).guard, GuardSettings()
    for name in ("exit_signals", "exit_duration_in_mins", "iterations_to_skip"):
        assert getattr(found, name) == changed.get(name, getattr(usual, name))
    assert found.no_check_for_nan_in_loss_and_grad is False


@pytest.mark.parametrize(("flags", "seconds"), [("", 1800.0), ("--hang-seconds 7.5", 7.5)])
def test_a_run_ends_after_half_the_time_of_a_collective_or_as_the_flag_says(
    flags: str, seconds: float
) -> None:
    found = run(f"--distributed-timeout-minutes 60 {flags}")
    minutes = found.parallel.devices.distributed_timeout_minutes
    assert found.guard.seconds_of_hang(minutes) == seconds


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--iterations-to-skip 3 0", "--iterations-to-skip 0: must be an iteration from 1 on"),
        ("--iterations-to-skip 3.5", "--iterations-to-skip 3.5: must be an iteration"),
        ("--exit-duration-in-mins 0", "--exit-duration-in-mins 0.0 at least 1e-06"),
        ("--hang-seconds nan", "--hang-seconds nan at least 1 "),
        ("--exit-signal SIGKILL", "--exit-signal SIGKILL choose SIGTERM SIGINT SIGUSR1 SIGUSR2"),
    ],
)
def test_a_mistake_is_told_with_flag_value_and_way_out(flags: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.split()[0]) as caught:
        run(flags)
    [line] = str(caught.value).splitlines()
    for word in words.split():
        assert word.strip(":;") in line


def test_a_word_that_is_no_iteration_hides_no_other_mistake() -> None:
    with pytest.raises(ValueError, match="--iterations-to-skip a") as caught:
        run("--iterations-to-skip a --exit-interval 0")
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--eval-interval 11", "--eval-interval 11 leaves the evaluation at the end: the last"),
        ("--eval-interval 10", ""),
        ("--eval-interval 10 --exit-interval 5", ""),
        ("--exit-interval 11", "--exit-interval 11 changes nothing: the last iteration is 10"),
        (
            "--iterations-to-skip 3 12 11",
            "--iterations-to-skip 11 12 changes nothing: the last iteration is 10",
        ),
        ("--exit-signal-handler", "--exit-signal-handler ends the run, and saves nothing"),
        ("--exit-signal-handler --save x", ""),
        ("--exit-duration-in-mins 3", "--exit-duration-in-mins 3 ends the run, and saves nothing"),
        ("--manual-gc-interval 5", "--manual-gc-interval 5 changes nothing without --manual-gc"),
        ("--exit-signal SIGUSR2", "--exit-signal SIGUSR2 changes nothing without --exit-signal-h"),
    ],
)
def test_what_never_comes_is_noted(flags: str, note: str) -> None:
    notes = run(flags).notes
    assert len(notes) == bool(note)
    assert "".join(notes).startswith(note)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("", "to go on from the last checkpoint, give --save and --load the same folder"),
        ("--save x --load y", "give --save and --load the same folder"),
        ("--save x --load ./x", "without --save-interval there is no checkpoint"),
        ("--save x --load ./x --save-interval 2", ""),
    ],
)
def test_a_restart_that_would_begin_anew_is_noted(
    flags: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    notes = run(flags).notes
    assert len(notes) == bool(note)
    assert note in "".join(notes)
