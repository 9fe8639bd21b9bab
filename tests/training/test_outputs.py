"""A file that could not be written is found before training, and looking for it leaves no trace."""

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.native import files
from megatron.run.log import LogSettings
from megatron.run.records import RecordSettings
from megatron.training.outputs import check_outputs, why_unwritten
from megatron.training.profiling.torch_trace import profiler

FLAGS = {
    "record_timeline": "--record-timeline",
    "save_measured_costs": "--save-measured-costs",
    "profile_dir": "--profile-dir",
}


def log(**files: Any) -> LogSettings:
    plain = LogSettings(profile="profile_dir" in files, profile_step_start=1, profile_step_end=2)
    return dataclasses.replace(plain, **files)


@pytest.mark.parametrize("name", FLAGS)
def test_folders_are_made_and_no_file(name: str, tmp_path: Path) -> None:
    check_outputs(log(**{name: tmp_path / "new" / "folder" / "out"}), rank=0)
    assert (tmp_path / "new" / "folder").is_dir()
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()]


def test_a_file_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("old")
    before = (tmp_path / "run.json").stat()
    check_outputs(log(record_timeline=tmp_path / "run.json"), rank=0)
    assert (tmp_path / "run.json").stat().st_mtime_ns == before.st_mtime_ns
    assert (tmp_path / "run.json").read_text() == "old"


@pytest.mark.parametrize("name", FLAGS)
def test_a_file_in_the_way_of_the_folder_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^{FLAGS[name]} {tmp_path}/file/.*: give"):
        check_outputs(log(**{name: tmp_path / "file" / "out"}), rank=0)


@pytest.mark.parametrize("taken", ["run.json", "run.planned.json", "run.trace.json"])
def test_a_folder_in_the_place_of_a_file_is_named(taken: str, tmp_path: Path) -> None:
    (tmp_path / taken).mkdir()
    with pytest.raises(ValueError, match=rf"--record-timeline .*{taken} .*directory"):
        check_outputs(log(record_timeline=tmp_path / "run.json"), rank=0)


def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(ValueError, match=r"--record-timeline .*run\.json .*it is a pipe"):
        check_outputs(log(record_timeline=tmp_path / "run.json"), rank=0)


def test_other_ranks_write_their_traces_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = tmp_path / "file" / "out"
    check_outputs(log(record_timeline=bad, save_measured_costs=bad), rank=1)
    with pytest.raises(ValueError, match=r"trace\.rank1\.json"):
        check_outputs(log(profile_dir=bad), rank=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_must_be_able_to_save(rank: int, tmp_path: Path) -> None:
    check_outputs(log(), rank, tmp_path / "new" / "checkpoints")
    assert not list((tmp_path / "new" / "checkpoints").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^--save {tmp_path}/file/.*: give"):
        check_outputs(log(), rank, tmp_path / "file" / "checkpoints")


def test_a_file_that_cannot_be_written_later_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    said = why_unwritten("--record-timeline", lambda: (tmp_path / "taken").write_text("text"))
    assert said is not None
    assert said.startswith("--record-timeline: [Errno 21] Is a directory: ")
    assert said.endswith("taken'; the run goes on without it")
    assert why_unwritten("--record-timeline", lambda: None) is None


def traced(folder: Path, shapes: bool = False) -> list[str]:
    """Trace an iteration, a product; return what was said."""
    said: list[str] = []
    config = log(profile_dir=folder, pytorch_profiler_collect_shapes=shapes)
    config = dataclasses.replace(config, profile_step_start=2, profile_step_end=3)
    with profiler(config, 0, said.append) as step:
        for _ in range(4):
            torch.ones(2, 3) @ torch.ones(3, 5)
            step()
    return said


def test_a_trace_is_there_when_it_is_complete(tmp_path: Path) -> None:
    assert not traced(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.rank0.json"]
    assert "traceEvents" in json.loads((tmp_path / "trace.rank0.json").read_text())


@pytest.mark.parametrize("shapes", [False, True])
def test_a_trace_has_shapes_if_they_are_asked_for(shapes: bool, tmp_path: Path) -> None:
    traced(tmp_path, shapes)
    events = json.loads((tmp_path / "trace.rank0.json").read_text())["traceEvents"]
    (product,) = [event for event in events if event.get("name") == "aten::mm"]
    assert product["args"].get("Input Dims") == ([[2, 3], [3, 5]] if shapes else None)


def test_only_the_named_ranks_are_traced(tmp_path: Path) -> None:
    config = dataclasses.replace(
        log(profile_dir=tmp_path), profile_step_start=2, profile_step_end=3
    )
    for rank in range(4):
        with profiler(dataclasses.replace(config, profile_ranks=(1, 3)), rank) as step:
            for _ in range(4):
                step()
    assert {path.name for path in tmp_path.iterdir()} == {"trace.rank1.json", "trace.rank3.json"}


def test_a_trace_that_is_cut_short_is_told_and_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profiler itself says nothing of a full disk."""

    def cut_short(_: object, path: str) -> None:
        Path(path).write_text('{"traceEvents": [')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut_short)
    [said] = traced(tmp_path)
    assert said.startswith(
        f"--profile-dir: {tmp_path}/trace.rank0.json was cut short after 17 bytes"
    )
    assert not list(tmp_path.iterdir())


def test_a_full_disk_ends_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "sync", full)
    [said] = traced(tmp_path)
    assert "No space left on device" in said


def with_records(**values: Any) -> LogSettings:
    return log(records=RecordSettings(**values))


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--log-jsonl", {"log_jsonl": "out"}),
        ("--tensorboard-dir", {"tensorboard_dir": "out"}),
        ("--wandb-save-dir", {"wandb_save_dir": "out", "wandb_project": "p"}),
    ],
)
def test_records_are_looked_for_on_the_rank_that_writes_them(
    flag: str, values: dict[str, str], tmp_path: Path
) -> None:
    def placed(folder: Path) -> LogSettings:
        return with_records(**{n: folder / v if v == "out" else v for n, v in values.items()})

    check_outputs(placed(tmp_path / "new"), rank=0)
    assert (tmp_path / "new").is_dir()
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()]
    (tmp_path / "file").touch()
    check_outputs(placed(tmp_path / "file"), rank=1)
    with pytest.raises(ValueError, match=f"^{flag} {tmp_path}/file/out.*: give"):
        check_outputs(placed(tmp_path / "file"), rank=0)


def test_a_file_of_something_else_is_not_appended_to(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine\n")
    with pytest.raises(ValueError, match=r"^--log-jsonl .*/notes: .* give another file"):
        check_outputs(with_records(log_jsonl=tmp_path / "notes"), rank=0)
