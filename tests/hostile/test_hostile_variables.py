"""Hostile environment variables: ``pretrain_gpt.sh`` runs none, and takes each as it is."""

import random
import shlex
from pathlib import Path
from typing import Final

import pytest
from harness.damage import within
from launch.made_up_machine import Machine

COUNT: Final = 60
PATIENCE: Final = 60
"""Seconds in which the script must have answered; it takes a tenth of one."""

SIZES: Final = (
    *("PIPELINE_SIZE", "TP_SIZE", "CP_SIZE", "GPUS_PER_NODE", "WORLD_SIZE", "RANK", "MASTER_PORT"),
    *("LAYERS", "HIDDEN_SIZE", "ATTENTION_HEADS", "SEQ_LENGTH", "IMM_SIZE", "GQA", "VOCAB_SIZE"),
    *("MICRO_BATCH_SIZE", "GLOBAL_BATCH_SIZE", "EXIT_INTERVAL", "EVAL_INTERVAL", "LOG_INTERVAL"),
    *("FINAL_STAGE_LAYERS", "ZERO_BUBBLE_MEM_LIMIT", "SCHEDULE_TIMER_START", "SCHEDULE_TIMER_END"),
)
WORDS: Final = (
    *("DATA_PATH", "TOKENIZER_MODEL", "AIP_RUN_NAME", "MASTER_ADDR", "EXTRA_OPTIONS", "VENV"),
    *("ZERO_BUBBLE_V_SCHEDULE_MEM_SETUP", "VOCAB_PARALLEL", "FB_SPLIT", "FP32", "MALLOC_CONF"),
)
MARK: Final = "executed"
COMMANDS: Final = (
    *(
        "$(touch MARK)",
        "`touch MARK`",
        "; touch MARK",
        "a\ntouch MARK",
        "| touch MARK",
        "&touch MARK",
    ),
    *("x[$(touch MARK)]", "a[`touch MARK`]+1", "1+x[$(touch MARK)]", "${x:=$(touch MARK)}"),
    *("'; touch MARK; '", '"; touch MARK; "', "$((x[$(touch MARK)]))", "--flag=$(touch MARK)"),
)
"""Words that a shell would run if it read one of them as code; in arithmetic, too."""

NUMBERS: Final = (
    *("", " ", "-1", "+1", "0", "00", "08", "0x10", "1e3", "1.5", "nan", "10**6", "2+2", "1 2"),
    *("\u0664", "\uff11", "1\u200b", "1\n", "9" * 30, "9" * 5000, "1000000000000", "65536", "1_0"),
    *("PATH", "$1", "*", "~", "..", "\\", "'", '"', "\x1b[31m", "k", "8kk", "-8k"),
)


def values_of(dice: random.Random, folder: Path) -> dict[str, str]:
    """Return one to three variables with values that no run has."""
    made: dict[str, str] = {}
    for name in dice.sample((*SIZES, *WORDS), dice.choice((1, 1, 2, 3))):
        value = dice.choice(COMMANDS if dice.random() < 0.6 else NUMBERS)
        made[name] = value.replace("MARK", str(folder / MARK))
    return made


@pytest.mark.parametrize("number", range(COUNT))
def test_a_variable_is_a_word_of_the_line_or_is_refused(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    variables = values_of(random.Random(number), tmp_path)
    with within(PATIENCE):
        done = Machine(tmp_path).run(**variables)
    assert not list(tmp_path.rglob(MARK)), variables
    assert done.returncode in (0, 2), (variables, done.stderr)
    if done.returncode:
        assert "\nerror: " in f"\n{done.stderr}", (variables, done.stderr)
        assert done.stdout == ""
        return
    [line] = list(_lines(done.stdout))
    words = shlex.split(line)
    assert words[0] == "env"
    for name, value in variables.items():
        if name in SIZES and value.strip():  # it is in the line as it was given, or was noted
            flags = [word for word in words if value in word]
            assert flags or f"{name}={value}" in done.stderr or _is_size(value), (name, line)


def _lines(printed: str) -> list[str]:
    """Return the commands of what was printed; a word may have line ends of its own."""
    return [printed] if printed.count("torchrun") == 1 else printed.splitlines()


def _is_size(value: str) -> bool:
    """Return whether a value is a number that the script may compute with, as 8k is 8000."""
    return value.isascii() and value.rstrip("k").isdigit()
