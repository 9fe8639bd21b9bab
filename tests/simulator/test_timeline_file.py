"""Timelines on disk: what is saved comes back, anything else is refused, and it can be drawn."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.draw.picture import Box, Picture
from megatron.simulator.draw.svg import paint_svg
from megatron.simulator.simulate import simulate
from megatron.simulator.timeline_file import load_timeline, save_timeline

ROOT = Path(__file__).resolve().parents[2]


def test_a_timeline_survives_its_file(tmp_path: Path) -> None:
    timeline = simulate(lower(make_plan("1f1b", "vocab-2", 2, 3)))
    save_timeline(timeline, tmp_path / "new folder" / "t.json")
    loaded = load_timeline(tmp_path / "new folder" / "t.json")
    assert loaded.ranks == timeline.ranks
    assert sorted(loaded.spans) == sorted(timeline.spans)
    assert timeline.waits, "nothing would be tested"
    assert sorted(loaded.waits) == sorted(timeline.waits)


SPAN = {"rank": 0, "lane": "compute", "label": "F0", "kind": "F", "microbatch": 0, "chunk": 0}


def written(ranks: object = 1, **changes: object) -> str:
    span = {**SPAN, "start": 0.0, "end": 1, **changes}
    return json.dumps({"ranks": ranks, "spans": [span]})


def overlapping(share: float) -> str:
    """Two passes of a rank, of which the second begins before the first has ended."""
    spans = [
        {**SPAN, "start": 0.0, "end": 1.0},
        {**SPAN, "label": "F1", "microbatch": 1, "start": 1 - share, "end": 2.0},
    ]
    return json.dumps({"ranks": 1, "spans": spans})


def test_times_of_a_gpu_are_rounded(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(overlapping(1e-7))
    assert len(load_timeline(tmp_path / "t.json").compute(0)) == 2


def test_a_file_written_by_hand_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(written())
    assert load_timeline(tmp_path / "t.json").spans[0].end == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '{"ranks": 2, "spans": [{"rank": 0}]}',
        "[" * 100_000,
        "\0",
        written(ranks=10**9),
        written(ranks="1"),
        written(ranks=None),
        written(rank=1),
        written(rank=True),
        written(start="0"),
        written(end=float("nan")),
        written(start=float("-inf")),
        written(microbatch=None),
        written(kind=3),
        written(more=0),
        written(lane="gpu"),
        written(kind='"/><script>alert(1)</script>'),
        written(kind="C1"),
        written(lane="comm"),
        written(lane="wait"),
        written(start=2.0),
        written(end=1e300),
        written(start=-1e300),
        written(microbatch=10**15),
        written(microbatch=-1),
        written(chunk=-1),
        written(chunk=10**9),
        written(rank=-1),
        overlapping(0.5),
    ],
)
def test_another_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json holds no timeline: .*--record-timeline"):
        load_timeline(path)


def test_a_recorded_timeline_is_drawn_beside_its_file(tmp_path: Path) -> None:
    save_timeline(simulate(lower(make_plan("1f1b", "none", 2, 3))), tmp_path / "run.json")
    command = [sys.executable, str(ROOT / "tools/draw.py"), "--timeline"]
    subprocess.run([*command, str(tmp_path / "run.json")], check=True, capture_output=True)
    assert (tmp_path / "run.svg").read_text().count("F2") >= 2
    missing = subprocess.run([*command, str(tmp_path / "no.json")], capture_output=True, text=True)
    assert missing.returncode != 0
    assert missing.stderr.startswith("error: ")


def test_what_would_be_too_long_to_look_at_is_not_drawn(tmp_path: Path) -> None:
    """A usual pass is a part in many millions of the whole time."""
    spans = [
        {**SPAN, "microbatch": m, "label": f"F{m}", "start": float(m), "end": m + 1e-6}
        for m in (0, 1, 1000)
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"ranks": 1, "spans": spans}))
    command = [sys.executable, str(ROOT / "tools/draw.py"), "--timeline", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "more than 1000 strips" in line
    assert "--window" in line


def test_names_in_a_picture_cannot_be_markup() -> None:
    box = Box("pass", '"/><script>', 0.0, 0.0, 1.0, 1.0, "</title><script>")
    text = paint_svg(Picture(100, 100, [box], [], []))
    assert "<script>" not in text
