"""A mistake of the command line is answered by one process, before data are made or ranks start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.check_flags import main

ROOT = Path(__file__).resolve().parents[2]

RUN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--train-iters 10 --lr 1e-3 --device cpu --pipeline-model-parallel-size 2 "
    "--tokenizer-type GPTSentencePieceTokenizer --data-path /nowhere/text "
    "--tokenizer-model /nowhere"
)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", []),
        ("--num-layrs 2", ["--num-layrs is no flag: did you mean --num-layers? see --help"]),
        (
            "--lr -1 --pipeline-schedule zbv",
            ["--pipeline-schedule zbv: did you", "--lr -1.0: must"],
        ),
        ("--num-layers 5", ["--num-layers 5 is not divisible by the 2 stages"]),
    ],
)
def test_all_mistakes_but_those_of_files_that_are_made_later(
    flags: str, told: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*RUN.split(), *flags.split()]) == (2 if told else 0)
    lines = [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines()]
    lines = [line for line in lines if line != "error:"]
    assert len(lines) == len(told)
    assert all(line.startswith(begin) for line, begin in zip(lines, told, strict=True))


@pytest.mark.parametrize(
    "flags",
    [
        "--num-layers-per-virtual-pipeline-stage 1 "
        "--microbatch-group-size-per-virtual-pipeline-stage 2",
    ],
)
def test_names_alone_are_judged_before_the_other_flags_are_known(
    flags: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to these depends on flags that the script adds."""
    monkeypatch.setenv("ONLY_WORDS", "1")
    assert main(flags.split()) == 0
    assert main([*flags.split(), "--num-layrs", "2"]) == 2
    assert capsys.readouterr().err.count("is no flag") == 1


def script(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "pretrain_gpt.sh"), *flags],
        env={**os.environ, "VENV": sys.prefix, "PIPELINE_SIZE": "2", "VOCAB_SIZE": "8k"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_ends_with_the_line_alone_and_starts_no_rank() -> None:
    done = script("--num-layrs", "2")
    assert done.stderr == "error: --num-layrs is no flag: did you mean --num-layers? see --help\n"
    assert (done.stdout, done.returncode) == ("", 2)


def test_the_script_shows_the_help_once() -> None:
    done = script("--help")
    assert done.stdout.count("usage: pretrain_gpt.py") == 1
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_mistake_in_a_flag_file_is_told_before_names_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONLY_WORDS", "1")
    file = tmp_path / "own.flags"
    file.write_text("--lr -1\n--num-layrs 2\nlr 3\n")
    assert main([f"@{file}"]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "error:"
    assert len(lines) == 2
    assert lines[0].startswith(f"{file}, line 3: 'lr' is no flag")
    assert lines[1].startswith("--num-layrs is no flag")
    assert lines[1].endswith(f"({file}, line 2)")
