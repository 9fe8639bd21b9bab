"""A command that is called within Python leaves the process as it found it."""

import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.commands.simulate_schedule import main
from megatron.commands.whole_process import reader_may_stop_early, without_garbage_collection

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("flags", ["", "--nonsense"])
def test_a_command_leaves_no_setting_behind(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Pipes that break would end the process of the tests; once that of two runs of them did."""
    before = signal.getsignal(signal.SIGPIPE)
    if flags:
        with pytest.raises(SystemExit):
            main(flags.split())
    else:
        main(["--json"])
        assert capsys.readouterr().out
    assert signal.getsignal(signal.SIGPIPE) == before == signal.SIG_IGN
    assert gc.isenabled()


def test_settings_hold_within() -> None:
    with reader_may_stop_early(), without_garbage_collection():
        assert signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL
        assert not gc.isenabled()
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_reader_that_stops_early_ends_the_command_without_a_word() -> None:
    program = "from megatron.commands.simulate_schedule import main; main()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == -signal.SIGPIPE
