"""Hostile folders of ways: each is read as it stands, and told in strict JSON, or is refused."""

import json
import os
import random
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
from harness.damage import within
from simulator.test_ways_folder import JOB, WAYS

from megatron.commands.exploring.interface import answer
from megatron.commands.exploring.simulated import Simulations
from megatron.simulator.ways_folder import LIST, WaysFolder, save_ways

COUNT: Final = 80
PATIENCE: Final = 60
"""Seconds for a folder; it takes some hundredths of one."""

SIMULATIONS: Final = Simulations()
LEAVES: Final[tuple[Any, ...]] = (
    *("", "x" * 5000, "<script>alert(1)</script>", "\u202e", "\ud800", "\x1b[2J", "../secret.json"),
    *("way-2.json", "candidates.json", "/dev/zero", "way-1.json/..", "taken", "none"),
    *(0, 1, -1, 2.5, 10**18, 10**400, 2**63, 1e300, 5e-324, float("nan"), float("inf")),
    *(None, True, False, [], {}, [0], {"t": 1}, [[]] * 3),
)


def damage(document: dict[str, Any], dice: random.Random) -> str:
    """Return the text of a list of ways of which one to three values are not those of a search."""
    for _ in range(dice.choice((1, 1, 2, 3))):
        at, own = dice.random(), dice.choice(document.get("ways") or [document])
        if at < 0.7 and isinstance(own, dict):
            own[dice.choice(sorted(own) or ["number"])] = dice.choice(LEAVES)
        elif at < 0.8 and isinstance(own, dict) and own:
            own.pop(dice.choice(sorted(own)))
        else:
            document[dice.choice(("model", "gpus", "ways", "more"))] = dice.choice(LEAVES)
            if not isinstance(document.get("ways"), list):
                break
    text = json.dumps(document)
    return text[: dice.randrange(len(text))] if dice.random() < 0.1 else text


def no_number(word: str) -> NoReturn:
    """Refuse a word that JSON has not, and a browser cannot read."""
    raise AssertionError(f"{word} is not JSON")


def read(folder: Path) -> WaysFolder | str:
    """Return the ways of a folder, or the message with which it is refused."""
    try:
        return WaysFolder.read(folder)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("number", range(COUNT))
def test_a_folder_is_read_as_it_stands_or_refused(number: int, tmp_path: Path) -> None:
    dice, folder = random.Random(number), tmp_path / "ways"
    save_ways(folder, JOB, WAYS)
    (tmp_path / "secret.json").write_text('{"secret": "word"}')
    text = damage(json.loads((folder / LIST).read_text()), dice)
    (folder / LIST).write_text(text)
    with within(PATIENCE):
        found = read(folder)
        if isinstance(found, str):
            assert found.startswith(f"{folder / LIST} ")
            assert len(found) < 400 + 2 * len(str(folder))
            return
        told = answer('{"action": "facts"}', SIMULATIONS, ways=found)
        listed = json.loads(told, parse_constant=no_number)["ways"]["ways"]
        whole = {own["number"]: own for own in json.loads(text)["ways"]}
        for own in listed:
            assert own.items() <= whole[own["number"]].items()
            way = answer(json.dumps({"action": "way", **own}), SIMULATIONS, ways=found)
            assert "secret" not in way
            assert ("drawing" in json.loads(way)) == (
                own["timeline"] in ("way-1.json", "way-2.json")
            )


@pytest.mark.parametrize("kind", ["pipe", "folder", "endless", "link"])
def test_files_that_are_none_are_not_waited_for(kind: str, tmp_path: Path) -> None:
    save_ways(tmp_path, JOB, WAYS)
    file = tmp_path / "way-1.json"
    found = WaysFolder.read(tmp_path)
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if kind == "endless" else tmp_path / "way-2.json")
    with within(PATIENCE):
        told = json.loads(answer('{"action": "way", "number": 1}', SIMULATIONS, ways=found))
    assert str(file) in told["error"]
    assert "give a f" in told["error"]
