"""The command prints what ``compare`` finds, as text or JSON, and draws both timelines."""

import json
from pathlib import Path

import pytest

from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.compare import compare
from megatron.simulator.simulate import Timeline, simulate
from megatron.simulator.timeline_file import save_timeline
from tools.compare_timelines import main


def timelines(folder: Path) -> tuple[Timeline, Timeline, list[str]]:
    """Return a plan as simulated with two costs, and the files: rank 1 is slower than planned."""
    plan = make_plan("1f1b", "vocab-2", 2, 4)
    planned = Costs(UNIT_COSTS.passes, {"C1": 0.5})
    real = Costs({**UNIT_COSTS.passes, "F": [1.0, 1.5]}, {"C1": 0.5})
    both = [simulate(lower(plan), costs) for costs in (planned, real)]
    names = [folder / "planned.json", folder / "real.json"]
    for timeline, path in zip(both, names, strict=True):
        save_timeline(timeline, path)
    return both[0], both[1], [str(path) for path in names]


def test_text_names_the_slow_rank_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned, real, files = timelines(tmp_path)
    main(files)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["F", "1", "1.25", "1.250"] in lines
    at = lines.index(["F", "1", "1.25", "1.250"])
    assert lines[at + 1 : at + 3] == [
        ["rank", "0", "1", "1", "1.000"],
        ["rank", "1", "1", "1.5", "1.500"],
    ]
    total = compare(planned, real).total
    assert ["iteration", *(f"{x:.4g}" for x in total), f"{total.ratio:.3f}"] in lines
    assert lines[at + 3][0] == "B"
    assert not any(line[0] == "rank" for line in lines[at + 3 : lines.index(lines[-5])] if line)


def test_json_holds_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned, real, files = timelines(tmp_path)
    main([*files, "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(compare(planned, real).as_json())
    )


def test_both_are_drawn_on_one_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned, real, files = timelines(tmp_path)
    main([*files, "--draw", str(tmp_path / "both.svg")])
    svg = (tmp_path / "both.svg").read_text()
    assert svg.count(">rank 1<") == 2
    total, idle = (getattr(compare(planned, real), name) for name in ("total", "idle"))
    assert f">planned: {total.planned:.4g} s, {idle.planned:.1%} idle<" in svg
    assert f">real: {total.real:.4g} s, {idle.real:.1%} idle<" in svg
    assert capsys.readouterr().out


def test_a_window_draws_its_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, files = timelines(tmp_path)
    drawn = []
    for window in ([], ["--window", "m3:m3"]):
        main([*files, "--draw", str(tmp_path / "a.svg"), *window])
        drawn.append((tmp_path / "a.svg").read_text())
    assert ["<title>F0:" in svg for svg in drawn] == [True, False]
    assert all("<title>B3:" in svg for svg in drawn)
    with pytest.raises(SystemExit, match="2"):
        main([*files, "--window", "m3:m3"])
    assert "--window m3:m3 is the part to draw: add --draw" in capsys.readouterr().err


def test_another_format_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["no.json", "none.json", "--draw", "both.gif"])
    error = "error: --draw {}: end it in .svg\n"
    assert capsys.readouterr() == ("", error.format("both.gif"))


def test_another_file_is_refused_by_name(tmp_path: Path) -> None:
    *_, files = timelines(tmp_path)
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no\.json holds no timeline"):
        main([files[0], str(tmp_path / "no.json")])
