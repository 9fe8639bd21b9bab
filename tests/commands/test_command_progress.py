"""How far a command is shows on a terminal, and nowhere else."""

import sys

import pytest

from megatron.commands.progress import shown, under_way


@pytest.mark.parametrize("on_terminal", [True, False])
def test_bars_are_for_terminals(
    on_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1" if on_terminal else "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    assert list(shown([3, 1, 2], "comparing")) == [3, 1, 2]
    with under_way("reading tensors"):
        pass
    printed = capsys.readouterr()
    assert printed.out == ""
    for what in ("comparing", "reading tensors"):
        assert (what in printed.err) == on_terminal
