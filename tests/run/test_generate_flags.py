"""Texts during training: what their flags become, what has no effect, and what is refused."""

from pathlib import Path

import pytest

from megatron.run.command_line import parse
from megatron.run.generate import GenerateSettings
from megatron.run.run_config import RunConfig

BASE = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 9 --device cpu --mock-data --vocab-size 99"
)
ON = ["--generate-interval", "3", "--generate-max-new-tokens", "4"]


def run(*flags: str) -> RunConfig:
    return parse([*BASE.split(), *flags], world_size=1)


def test_no_text_by_default() -> None:
    assert run().log.generate == GenerateSettings()


def test_flags_of_texts() -> None:
    config = run(
        *ON, "--generate-prompt", "1 2", "once 'upon'", "--generate-prompts-file", "p.txt",
        "--generate-temperature", "0.5", "--generate-top-k", "9", "--generate-top-p", "0.9",
    )  # fmt: skip
    prompts = ("1 2", "once 'upon'")
    assert config.log.generate == GenerateSettings(3, prompts, Path("p.txt"), 4, 0.5, 9, 0.9)
    assert config.notes == ()


@pytest.mark.parametrize(
    ("flags", "noted"),
    [
        (["--generate-prompt", "1"], "--generate-prompt 1 changes nothing without --generate-int"),
        ([*ON, "--generate-top-k", "3"], "changes nothing without --generate-temperature"),
        ([*ON[2:], "--generate-interval", "10"], "--generate-interval 10 changes nothing: the la"),
    ],
)
def test_flags_without_effect_are_noted(flags: list[str], noted: str) -> None:
    [note] = run(*flags).notes
    assert noted in note


def test_a_text_that_fills_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--generate-max-new-tokens 8 leaves no room.*8 tok"):
        run("--generate-interval", "3", "--generate-max-new-tokens", "8")


def test_a_prompt_of_broken_utf_8_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--generate-prompt .*no UTF-8; put it into"):
        run(*ON, "--generate-prompt", "caf\udce9")


@pytest.mark.parametrize("flag", ["--eod-mask-loss", "--reset-attention-mask"])
def test_texts_that_begin_where_nothing_is_trained_are_noted(flag: str) -> None:
    assert [note.split(":")[0] for note in run(*ON, flag).notes] == [flag]
    assert run(flag).notes == ()
    assert run(*ON, flag, "--generate-prompt", "1").notes == ()
    assert run(*ON, flag, "--generate-prompts-file", "p.txt").notes == ()
