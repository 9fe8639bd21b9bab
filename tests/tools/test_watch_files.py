"""A file of records that grows, is mended or replaced, or holds other lines too, is read whole."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training.metrics.made_records import interval as real_interval
from training.metrics.made_records import started as real_start

from megatron.commands.watching.growing_file import GrowingFile
from megatron.commands.watching.page_data import View, page_data
from megatron.commands.watching.records_file import MOST_RUNS, RecordsFile
from megatron.commands.watching.watched import Watched
from megatron.training.metrics.json_lines import JsonLines
from tools.watch_records import EVENTS, interval, lines, start, write

BROKEN: Final = st.sampled_from(
    [b"{", b'{"event": "iterations", "itera', b"\xff\xfe", b"[]", b"null", b"", b" ", b"\r",
     b'{"event": 3}', b'{"event": "iterations", "iteration": -1}', b"[" * 5000,
     b'{"event": "iterations", "iteration": 1e9}', b'{"event": "iterations"}']
)  # fmt: skip
"""Lines that are no records."""


def file_of(path: Path) -> RecordsFile:
    found = RecordsFile(path, path.name)
    found.read_all()
    return found


@given(
    st.lists(st.builds(lambda own: lines([own]), EVENTS) | BROKEN.map(lambda own: own + b"\n")),
    st.lists(st.integers(0, 5000), max_size=6),
)
def test_reading_in_pieces_is_reading_whole(parts: list[bytes], cuts: list[int]) -> None:
    content = b"".join(parts)
    with TemporaryDirectory() as folder:
        whole, grown = (RecordsFile(Path(folder, name), "r") for name in ("whole", "grown"))
        whole.path.write_bytes(content)
        whole.read_all()
        for cut in sorted({min(cut, len(content)) for cut in (*cuts, len(content))}):
            grown.path.write_bytes(content[:cut])
            grown.read_all()
    for file in (whole, grown):
        file.read_all()  # the files are gone, and all that has been read stays
    assert list(grown.notes()) == list(whole.notes())
    one, other = (page_data(list(file.runs.values()), View()) for file in (grown, whole))
    assert one == other
    assert grown.records == whole.records


@given(st.lists(st.binary(max_size=30).map(lambda own: own.replace(b"\n", b"")), max_size=20),
       st.lists(st.integers(0, 400), max_size=8))  # fmt: skip
def test_lines_are_whole_and_those_that_are_too_long_are_left_out(
    written: list[bytes], cuts: list[int]
) -> None:
    content, found = b"".join(line + b"\n" for line in written), list[bytes]()
    with TemporaryDirectory() as folder:
        path = Path(folder, "file")
        file = GrowingFile(path, longest=12, at_once=8)
        for cut in sorted({min(cut, len(content)) for cut in (*cuts, len(content))}):
            path.write_bytes(content[:cut])
            while not (look := file.look()).is_all:
                found += look.lines
    assert found == [line for line in written if line.strip() and len(line) <= 12]
    assert file.too_long == sum(len(line) > 12 for line in written)


def test_a_file_that_the_run_itself_mends_is_read_on(tmp_path: Path) -> None:
    """A killed process leaves half a line; the next process removes it and appends."""
    path = tmp_path / "r.jsonl"
    sink, file = JsonLines(path), RecordsFile(path, "r")
    sink.write(real_start())
    sink.write(real_interval(5))
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:40])
    file.read_all()
    assert "the last line is cut off" in " ".join(file.notes())
    other = JsonLines(path)
    other.write(real_start(5))
    other.write(real_interval(10))
    file.read_all()
    assert list(file.notes()) == []
    [run] = file.runs.values()
    assert list(run.intervals.iterations) == [5, 10]
    assert [own.iteration for own in run.restarts] == [5]


@pytest.mark.parametrize("way", ["shorter", "longer", "another file"])
def test_a_file_that_is_replaced_is_read_anew(way: str, tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", start(), interval(5), interval(10))
    file = file_of(path)
    later = [start(run="b"), interval(5, "b", lm_loss=1.0)]
    if way == "longer":
        later += [interval(at, "b") for at in range(10, 40)]
    if way == "another file":
        os.replace(write(tmp_path / "other", *later), path)
    else:
        write(path, *later)
    file.read_all()
    assert list(file.runs) == ["b"]
    assert file.runs["b"].intervals.newest("lm_loss") == (1.0 if way != "longer" else 6.1)
    assert "replaced or made shorter" in " ".join(file.notes())


def test_what_is_no_record_is_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    odd = {**interval(10), "event": "another"}
    path.write_bytes(lines([start(), interval(5)]) + b'{"half\n\n[]\n' + lines([odd, interval(15)]))
    notes = " ".join(file_of(path).notes())
    assert "2 lines are no records and are left out; the first is the file's line 3" in notes
    assert "1 records of unknown events" in notes
    assert list(file_of(path).runs["a"].intervals.iterations) == [5, 15]


def test_very_many_runs_are_bounded(tmp_path: Path) -> None:
    records = [interval(5, str(at)) for at in range(MOST_RUNS + 3)]
    file = RecordsFile(write(tmp_path / "r.jsonl", *records), "r")
    watched = Watched([file])
    watched.read_all()
    data = watched.data(View())
    assert len(file.runs) == MOST_RUNS
    assert len(data["runs"]) == 32
    assert "3 records of further runs" in data["notes"][0]
    assert data["notes"][1] == f"Of {MOST_RUNS} runs the 32 with the latest records are shown."


def test_a_glance_at_a_large_file_shows_its_whole_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.commands.watching.records_file._LARGE", 1000)
    path = write(tmp_path / "r.jsonl", start(), *(interval(at) for at in range(1, 5001)))
    file = RecordsFile(path, "r")
    file.glance()
    [glanced] = file.runs.values()
    seen = glanced.intervals.iterations
    assert file.is_glanced
    assert 500 < len(seen) < 5000
    assert seen[0] < 100
    assert seen[-1] > 4800
    assert glanced.facts["train_iters"] == 100
    file.read_all()
    assert not file.is_glanced
    assert list(file.runs["a"].intervals.iterations) == list(range(1, 5001))
