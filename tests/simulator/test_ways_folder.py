"""Ways as a folder: what is written is read, and nothing else is written over or read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator import ways_folder
from megatron.simulator.simulate import simulate
from megatron.simulator.ways_folder import LIST, WaysFolder, fault_of_target, save_ways

TIMELINES: Final = [simulate(lower(make_plan(own, "vocab-2", 2, 3))) for own in ("1f1b", "gpipe")]
JOB: Final = {"model": "model/config.json", "gpus": {"name": "H100", "count": 8, "machines": 1}}


def way(**changes: object) -> dict[str, Any]:
    """Return the figures of a way, as ``tools/plan.py --json`` has them."""
    usual: dict[str, Any] = {
        "role": "",
        "fits": True,
        "words": ["--pipeline-model-parallel-size", "2"],
        "layout": {"t": 4, "p": 2, "c": 1, "d": 1},
        "schedule": "1f1b",
        "vocabulary": "vocab-2",
        "planned": False,
        "seconds": 2.5,
        "bytes": 60 << 30,
        "bytes_left": 10 << 30,
        "mfu": 0.4,
        "tokens_per_second": 1e6,
        "days": None,
        "microbatches": 3,
        "timeline_microbatches": 3,
    }
    return {**usual, **changes}


WAYS: Final = [
    (way(role="obstacle", fits=False, seconds=1.5, bytes_left=-5), TIMELINES[0]),
    (way(role="taken", planned=True), TIMELINES[1]),
    (way(days=3.25), None),
]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    save_ways(tmp_path / "new", JOB, WAYS)
    found = WaysFolder.read(tmp_path / "new")
    assert found.listed["model"] == "model/config.json"
    assert found.listed["gpus"] == {"name": "H100", "count": 8}
    names = ("way-1.json", "way-2.json", None)
    for number, (own, (figures, _), name) in enumerate(
        zip(found.listed["ways"], WAYS, names, strict=True), 1
    ):
        assert own == {"number": number, **figures, "timeline": name}
    for number, timeline in enumerate(TIMELINES, 1):
        again = found.timeline(number)
        assert sorted(again.spans) == sorted(timeline.spans)
        assert sorted(again.waits) == sorted(timeline.waits)
    with pytest.raises(ValueError, match=r"way 3 has no timeline, because it has more than"):
        found.timeline(3)
    with pytest.raises(ValueError, match=r"there is no way 4: give a number from 1 to 3"):
        found.timeline(4)


def test_ways_of_an_earlier_search_are_replaced(tmp_path: Path) -> None:
    save_ways(tmp_path, JOB, WAYS)
    assert fault_of_target(tmp_path) == ""
    save_ways(tmp_path, JOB, WAYS[1:])
    assert {own.name for own in tmp_path.iterdir()} == {LIST, "way-1.json"}
    assert sorted(WaysFolder.read(tmp_path).timeline(1).spans) == sorted(TIMELINES[1].spans)


def test_a_timeline_too_large_for_a_page_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = len(TIMELINES[0].spans) + len(TIMELINES[0].waits)
    monkeypatch.setattr(ways_folder, "MOST_SPANS", spans)
    save_ways(tmp_path, JOB, WAYS[:1])
    assert WaysFolder.read(tmp_path).timeline(1).ranks == 2
    monkeypatch.setattr(ways_folder, "MOST_SPANS", spans - 1)
    save_ways(tmp_path, JOB, WAYS[:1])
    assert {own.name for own in tmp_path.iterdir()} == {LIST}
    assert WaysFolder.read(tmp_path).listed["ways"][0]["timeline"] is None


def test_folders_of_other_files_are_not_written_into(tmp_path: Path) -> None:
    assert fault_of_target(tmp_path / "new") == ""
    assert fault_of_target(tmp_path) == ""
    (tmp_path / "way-01.json").write_text("mine")
    assert "holds other files, such as 'way-01.json': give a new" in fault_of_target(tmp_path)
    assert "is no folder" in fault_of_target(tmp_path / "way-01.json")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "is no folder" in fault_of_target(tmp_path / "link")


def test_a_link_of_a_way_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in (LIST, "way-1.json", "way-7.json"):
        (tmp_path / "ways").mkdir(exist_ok=True)
        (tmp_path / "ways" / name).symlink_to(mine)
    save_ways(tmp_path / "ways", JOB, WAYS[:1])
    assert mine.read_text() == "mine"
    assert WaysFolder.read(tmp_path / "ways").timeline(1).ranks == 2
    assert not (tmp_path / "ways" / "way-7.json").is_symlink()


def damaged(folder: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """Return why a folder is refused whose list is changed."""
    save_ways(folder, JOB, WAYS)
    document = json.loads((folder / LIST).read_text())
    change(document)
    (folder / LIST).write_text(json.dumps(document))
    with pytest.raises(
        ValueError, match=r"give a folder that plan-pretraining --explore wrote"
    ) as e:
        WaysFolder.read(folder)
    assert str(e.value).startswith(f"{folder / LIST} ")
    return str(e.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeline", "../mine.json"),
        ("timeline", "/etc/passwd"),
        ("timeline", "way-1.json/../../mine.json"),
        ("timeline", "candidates.json"),
        ("timeline", "way-1.json\n"),
        ("timeline", 3),
        ("timeline", "way-9.json"),
        ("role", "best"),
        ("role", []),
        ("fits", 1),
        ("words", "--bf16"),
        ("words", ["\u202e"]),
        ("layout", {"t": 0.5}),
        ("layout", []),
        ("schedule", None),
        ("seconds", 0),
        ("seconds", float("nan")),
        ("seconds", 1e300),
        ("seconds", 5),
        ("mfu", 10**400),
        ("bytes", 1.5),
        ("bytes", 2**60),
        ("mfu", True),
        ("days", "3"),
        ("number", 1),
        ("microbatches", -1),
    ],
    ids=lambda value: str(value)[:30],
)
def test_values_of_another_kind_are_refused(tmp_path: Path, name: str, value: object) -> None:
    told = damaged(tmp_path, lambda document: document["ways"][1].update({name: value}))
    assert "way 2" in told or "NaN" in told or "way-9.json" in told
    assert len(told) < 250 + 2 * len(str(tmp_path))


def test_lists_that_are_none_are_refused(tmp_path: Path) -> None:
    assert "holds no list of ways" in damaged(tmp_path, lambda own: own.pop("ways"))
    assert "lists 0 ways" in damaged(tmp_path, lambda own: own["ways"].clear())
    assert "has no 'words' of way 1" in damaged(tmp_path, lambda own: own["ways"][0].pop("words"))
    assert "as way 1, which must be an" in damaged(tmp_path, lambda own: own.update(ways=[1]))
    assert "which must be a name" in damaged(tmp_path, lambda own: own.update(model=["x"]))
    assert "must have a name and a count" in damaged(tmp_path, lambda own: own.update(gpus="H100"))
    for text in ("", "[" * 100_000, "{", "\0", "[]"):
        (tmp_path / LIST).write_text(text)
        with pytest.raises(
            ValueError, match=r"give a folder that plan-pretraining --explore wrote"
        ):
            WaysFolder.read(tmp_path)
    with pytest.raises(ValueError, match=r"candidates.json: No such file or directory: give a"):
        WaysFolder.read(tmp_path / "nowhere")


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "ways"
    save_ways(folder, JOB, WAYS)
    (folder / "way-1.json").rename(tmp_path / "outside.json")
    (folder / "way-1.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(ValueError, match=r"way-1.json is a link, which may lead out of the folder"):
        WaysFolder.read(folder).timeline(1)
    (folder / LIST).rename(tmp_path / "list.json")
    (folder / LIST).symlink_to(tmp_path / "list.json")
    with pytest.raises(ValueError, match=r"candidates.json is a link, which may lead out"):
        WaysFolder.read(folder)
