"""docs/launch-lines.md says what becomes of every flag of the public launch scripts."""

import pytest

from megatron.run.command_line import read
from megatron.run.told import Told
from tools.launch_lines_page import PAGE, LaunchList, asked, launch_lists, page, told

LISTS = launch_lists()
MISSING = {
    "M-LM gpt3_175b": set(),
    "M-LM 345M tp2pp2": set(),
    "VP fork vocab-1": set(),
    "ZB fork ZBV": set(),
    "ZB v-half-vocab": set(),
    "Swiss-AI llama3-8b": set(),
    "Pai llama3.1-8b": {
        "other tokenizers",
    },
    "ROCm llama3-70b": set(),
    "llm-jp 175b": {
        "other checkpoints",
    },
    "BLOOM-176B": set(),
    "M-LM mixtral-8x7b": set(),
    "ModelZoo deepseek-v3": set(),
    "ModelZoo qwen3-30b-a3b": set(),
    "Pai qwen2-57b-a14b": {
        "other checkpoints",
        "other tokenizers",
    },
    "Pai moonlight-16b-a3b": {
        "other tokenizers",
    },
    "llm-jp v4-291b-a27b": set(),
    "MindSpeed hunyuan3-299b": {
        "offloading",
        "other checkpoints",
        "other layers",
        "weights converted at the start",
    },
    "ZB fork gpt3-8-experts": set(),
}
"""What the flags of each list are refused for. A feature that is built leaves all of them.

Empty: a rule about flags of this project refuses a value that is not built.
"""


def refused(launch: LaunchList) -> list[Told]:
    return [answer for answer in told(launch) if answer.verdict == "refused"]


def test_the_page_is_current() -> None:
    """Else: python tools/launch_lines_page.py."""
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("launch", LISTS, ids=lambda launch: launch.name)
def test_nothing_is_refused_but_for_what_is_missing_by_name(launch: LaunchList) -> None:
    assert {answer.feature for answer in refused(launch)} == MISSING[launch.name]


@pytest.mark.parametrize("launch", LISTS, ids=lambda launch: launch.name)
def test_every_flag_has_one_answer_and_every_answer_a_line(launch: LaunchList) -> None:
    answers = told(launch)
    assert [answer.flag for answer in answers] == [" ".join(flag) for flag in launch.flags]
    assert all(bool(answer.line) == (answer.verdict != "accepted") for answer in answers)


@pytest.mark.parametrize("launch", LISTS, ids=lambda launch: launch.name)
def test_a_line_without_its_refused_flags_is_accepted(launch: LaunchList) -> None:
    """All refusals are told at once: following them leads to a run in one step."""
    out = {answer.flag.split()[0] for answer in refused(launch)}
    flags = tuple(flag for flag in launch.flags if flag[0] not in out)
    rest = LaunchList(launch.name, launch.source, flags, launch.values)
    assert not read(asked(rest), world_size=1).mistakes
