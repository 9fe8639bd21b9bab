"""tools/first_run.py finds the marks and the longest silence of a run."""

import pytest

from tools.first_run import Line, main, summary


def test_marks_silence_and_cpu_seconds() -> None:
    lines = [
        Line(1.0, "Setting up /clone/.venv (base), once"),
        Line(9.0, "     8 s: Collecting torch"),
        Line(20.0, "Done after 19 s. To call its python"),
        Line(21.5, "env OMP_NUM_THREADS=1 .venv/bin/torchrun --standalone"),
        Line(30.0, " [2026] iteration        1/      30 | consumed samples: 6 |"),
        Line(32.0, " [2026] iteration        2/      30 | consumed samples: 12 |"),
    ]
    told = [" ".join(line.split()) for line in summary(lines, 33.0, 40.5)]
    assert told == [
        "1.0 s the setup begins",
        "20.0 s the setup is done",
        "never the model is chosen",
        "21.5 s torchrun starts",
        "30.0 s the first loss",
        "never the last screen",
        "33.0 s the end",
        "11.0 s the longest silence, after: 8 s: Collecting torch",
        "40.5 s of CPU in all",
    ]


def test_a_word_that_is_no_variable_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 2
    assert "--help: give variables as NAME=VALUE" in capsys.readouterr().err
