"""The flags of public launch scripts are read from scripts in every style, one by one."""

import pytest
from foreign.scripts import STYLES

from megatron.flags.words import spelling, split
from megatron.foreign.walk import read_script
from tools.launch_lines_page import LaunchList, launch_lists


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("launch", launch_lists(), ids=lambda launch: launch.name)
def test_the_flags_read_are_those_of_the_list(launch: LaunchList, style: str) -> None:
    script = read_script(STYLES[style](launch.flags).replace("\r\n", "\n"))
    (found,) = script.launches
    words = list(map(script.holes.shown, found.words))
    assert list(split(words)) == [(spelling(flag[0]), list(flag[1:])) for flag in launch.flags]
    assert (found.ranks.machines, found.ranks.per_machine) == (2, 8)
    assert found.program.endswith("pretrain_gpt.py")
