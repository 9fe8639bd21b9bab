"""The file of JSON lines is whole and readable whatever happens to the run or to the disk."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from training.metrics.made_records import (
    ended,
    evaluation,
    generated,
    interval,
    started,
    step,
)

from megatron.training.metrics.json_lines import JsonLines, check_json_lines
from megatron.training.metrics.records import Record


def write(path: Path, *records: Record) -> None:
    sink = JsonLines(path)
    for record in records:
        sink.write(record)
    sink.close(failed=False)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_a_line_for_every_event_but_single_iterations(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, started(), step(1), step(2), interval(2), evaluation(2), ended(2))
    lines = read(path)
    assert [line["event"] for line in lines] == ["start", "iterations", "evaluation", "end"]
    assert len({line["run"] for line in lines}) == 1
    first, iterations, validation, _ = lines
    assert first["config"]["model"]["vocab_size"] == 61
    assert first["config"]["train"]["precision"]["main_grads_dtype"] == "fp32"
    assert first["config"]["parallel"]["devices"]["device"] == "cpu"
    assert first["time"] == "2026-11-22T12:00:00.000+00:00"
    assert (iterations["iteration"], iterations["lm_loss"]) == (2, 9.8)
    assert iterations["ranks"][1] == {
        "rank": 1,
        "peak_memory": 3000,
        "reserved_memory": None,
        "idle": 0.375,
        "idle_by_reason": {},
        "computing": {},
        "slowness": None,
    }
    assert validation["perplexity"] == math.exp(2)


def test_what_json_has_no_number_for_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, started(), interval(1, mfu=math.inf), evaluation(1, lm_loss=math.nan))
    _, iterations, validation = read(path)
    assert iterations["mfu"] is None
    assert validation["lm_loss"] is None


def test_a_run_that_goes_on_has_the_same_id_and_a_new_one_another(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, started(), interval(5))
    write(path, started(5), interval(10))
    write(path, started(0), interval(5))
    ids = [line["run"] for line in read(path)]
    assert len(set(ids[:4])) == 1
    assert len(set(ids[4:])) == 1
    assert ids[0] != ids[4]


@pytest.mark.parametrize("kept", [1, 30])
def test_a_line_that_a_kill_has_cut_off_is_removed(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, started(), interval(5), interval(10))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:kept])
    check_json_lines(path)
    write(path, started(5), interval(10))
    assert [line["iteration"] for line in read(path)] == [0, 5, 5, 10]
    assert len({line["run"] for line in read(path)}) == 1


def test_a_failed_write_leaves_whole_lines_and_the_next_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes some bytes of a line, and then none."""
    path = tmp_path / "log.jsonl"
    sink = JsonLines(path)
    sink.write(started())
    room = [10]

    def scarce(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken, room[0] = room[0], 0
        return os_write(file, data[:taken])

    os_write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", scarce)
        with pytest.raises(OSError, match="No space left"):
            sink.write(interval(1))
    sink.write(interval(2))
    assert [line["iteration"] for line in read(path)] == [0, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="No space left"):
        JsonLines(Path("/dev/full")).write(started())


@pytest.mark.parametrize("content", ["notes of mine\n", "[]\n", '{"event": "other"}\n', "\n", "1"])
def test_a_file_of_something_else_is_refused_and_stays(content: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"^--log-jsonl {path}: .* give another file$"):
        check_json_lines(path)
    assert path.read_text() == content


def test_an_empty_file_and_none_will_do(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    check_json_lines(path)
    path.touch()
    check_json_lines(path)


def test_texts_with_their_prompts_and_tokens(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, started(), generated(5))
    own = read(path)[1]
    assert (own["event"], own["iteration"], own["seconds"]) == ("generation", 5, 0.5)
    assert own["texts"] == [
        {"prompt": "Once\nupon", "text": " a `time`", "tokens": [4, 5]},
        {"prompt": "", "text": "mice\u200b", "tokens": [6]},
    ]
