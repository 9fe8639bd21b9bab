"""Tables of measured runs: what is read, and what is refused with its place."""

from pathlib import Path

import pytest

from tools.predictions.measured import hop_like, read_measured
from tools.synthetic_runs import as_csv, run


def test_what_was_written_is_read(tmp_path: Path) -> None:
    runs = [run("baseline", 32_000), run("vocab-1", 64_000, ranks=4)]
    file = tmp_path / "runs.csv"
    file.write_text(as_csv(runs))
    assert read_measured(file) == runs


@pytest.mark.parametrize(("method", "share"), [("vocab-1", 1 / 3), ("vocab-2", 2 / 3)])
def test_st_is_divided_by_its_products(method: str, share: float) -> None:
    measured = run(method, 64_000)
    assert measured.costs(5.0).passes["S"] == [share * time for time in measured.times["ST"]]
    halves = measured.costs(5.0, 0.5)
    assert halves.passes["S"] == halves.passes["T"] == [time / 2 for time in measured.times["ST"]]
    assert halves.comms == {"X": 5.0, "G": 5.0}


def test_a_whole_output_layer_has_no_passes_of_its_own() -> None:
    assert set(run("redis", 64_000).costs(0.0).passes) == {"F", "B"}


def test_a_hop_that_was_not_measured_is_that_of_like_messages() -> None:
    measured = run("vocab-1", 64_000)
    silent = run("baseline", 64_000)
    silent = type(silent)(**{**vars(silent), "times": {**silent.times, "p2p": (0.0,) * 8}})
    longer = type(silent)(**{**vars(silent), "seq_length": 4096})
    assert hop_like(silent, [silent, measured]) == measured.hop > 0
    assert hop_like(longer, [silent, measured]) == 0
    assert hop_like(measured, [silent]) == measured.hop


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("vocab-1", "vocab-9", "line 3, column method: 'vocab-9' is not one of baseline"),
        ("2048,64000", "2048,many", "line 3, column vocab_size: 'many' is not a whole number"),
        ("2048,64000", "-5,64000", "line 3, column seq_length: '-5' is not a whole number"),
        ("77.0 77.0", "77.0 x", "line 3, column F_us: 'x' is not a time of 0 or more"),
        ("77.0 77.0", "77.0 nan", "column F_us: 'nan' is not a time"),
        ("77.0 77.0", "77.0 -1", "column F_us: '-1' is not a time"),
        ("88.0 88.0", "88.0", "column B_us: '88.0' is not a time for each of the 2 ranks of F_us"),
        ("77.0 77.0", "", "column F_us: '' is not a time for each rank"),
        (",1.0\n", ",0\n", "column iteration_ms: '0' is not one time above 0"),
        (",1.0\n", "\n", "line 3 ends before column iteration_ms"),
        ("iteration_ms", "time", "line 1: no column iteration_ms"),
    ],
)
def test_a_bad_cell_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    runs = [run("baseline", 64_000, ranks=2), run("vocab-1", 64_000, ranks=2)]
    marked = type(runs[1])(
        **{**vars(runs[1]), "times": {**runs[1].times, "F": (77.0, 77.0), "B": (88.0, 88.0)}}
    )
    head, first, second = as_csv([runs[0], marked]).splitlines(keepends=True)
    text = head + first + second
    assert old in text
    text = head.replace(old, new) + first + second.replace(old, new)
    file = tmp_path / "runs.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_measured(file)


def test_no_file_and_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*nowhere\.csv"):
        read_measured(tmp_path / "nowhere.csv")
    empty = tmp_path / "empty.csv"
    empty.write_text(as_csv([]))
    with pytest.raises(ValueError, match="holds no run"):
        read_measured(empty)
