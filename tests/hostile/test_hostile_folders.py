"""Hostile folders: none takes all memory, keeps a reader for ever, or has a file overwritten.

A folder of a stranger may hold links to endless devices, pipes, and links to files of the user.
"""

import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from harness.damage import within
from training.metrics.made_records import started

from megatron.checkpoint import folder, lock, storage
from megatron.checkpoint.common import COMMON, read_common
from megatron.checkpoint.foreign import megatron_core
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.checkpoint.foreign.tensor_files import INDEX, ONE_FILE, TensorFiles
from megatron.checkpoint.metadata import METADATA, read_metadata
from megatron.data.index_cache import IndexCache
from megatron.data.preparation.unfinished import held, read_state
from megatron.native import files, slow_work
from megatron.native.files import locked, replace_text
from megatron.run.log import LogSettings
from megatron.run.records import RecordSettings
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.draw.trace import save_chrome_trace
from megatron.simulator.simulate import Span, Timeline, simulate
from megatron.simulator.timeline_file import load_timeline, save_timeline
from megatron.training.metrics.progress_file import FILE as PROGRESS
from megatron.training.metrics.progress_file import ProgressFile
from megatron.training.outputs import check_outputs
from tools import checkpoint

ROOM: Final = 1 << 30
"""Bytes by which a reader may grow; an endless file needs more within a second."""
PATIENCE: Final = 60
NAME: Final = "iter_0000003"


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Let this process grow by ``ROOM``; beyond that Python raises ``MemoryError``."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    with within(PATIENCE):
        yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def listing(*names: str) -> str:
    """Return a manifest that says that the files are empty."""
    entry = {"size": 0, "blake3": ""}
    return json.dumps({"format": 3, "iteration": 3, "files": dict.fromkeys(names, entry)})


def pointer(root: Path) -> None:
    assert folder.pointed_to(root) is None
    raise folder.DamagedError(f"{root / folder.POINTER} is passed over")


def file_of_manifest(where: Path) -> None:
    (where / folder.MANIFEST).write_text(listing("values.json"))
    if problem := folder.problem_of(where, threads=1):
        raise folder.DamagedError(problem)


def metadata(where: Path) -> None:
    (where / folder.MANIFEST).write_text(listing(METADATA))
    read_metadata(where)


def cached(where: Path) -> None:
    assert IndexCache(where, "text").load() is None
    raise folder.DamagedError(f"{where / 'text-checksums.json'} is not used")


def last_progress(where: Path) -> None:
    ProgressFile(where).write(started())


READERS: Final[dict[str, Callable[[Path], Any]]] = {
    folder.POINTER: pointer,
    folder.MANIFEST: folder.read_manifest,
    COMMON: read_common,
    METADATA: metadata,
    "values.json": file_of_manifest,
    INDEX: TensorFiles,
    ONE_FILE: TensorFiles,
    megatron_core.COMMON: megatron_core.arguments,
    "text-checksums.json": cached,
    "state.json": read_state,
    PROGRESS: last_progress,
}
"""Every file of a folder that is read, and its reader."""

REFUSALS: Final = (folder.DamagedError, ForeignError, ValueError, OSError)


@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_no_regular_file_is_refused(
    name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / NAME
    where.mkdir()
    if kind == "device":
        (where / name).symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(where / name)
    else:
        (where / name).mkdir()
    if name == megatron_core.COMMON:  # a checkpoint without arguments is one of an older version
        assert megatron_core.arguments(where) is None
        return
    with pytest.raises(REFUSALS) as told:
        READERS[name](where)
    said = str(told.value) + caplog.text
    told_why = "not a file" in said or "bytes" in said
    assert told_why or name == folder.POINTER  # is passed over without an error


def test_ten_bytes_of_metadata_take_no_gigabytes(tmp_path: Path) -> None:
    """An object of number 134217727 takes memory for all numbers below, 2 GB."""
    where = tmp_path / NAME
    where.mkdir()
    (where / METADATA).write_bytes(b"\x80\x02Nr\xff\xff\xff\x07.")
    with pytest.raises(folder.DamagedError, match="9 bytes and an object with number 134217727"):
        metadata(where)


@pytest.mark.parametrize(
    ("name", "size"),
    [(folder.POINTER, 1 << 40), (folder.MANIFEST, 1 << 40), (megatron_core.COMMON, 1 << 40)],
)
def test_a_file_of_a_terabyte_is_refused(name: str, size: int, tmp_path: Path) -> None:
    where = tmp_path / NAME
    where.mkdir()
    (where / name).touch()
    os.truncate(where / name, size)  # takes no room on the disk
    with pytest.raises(REFUSALS) as told:
        READERS[name](where)
    assert name in str(told.value)


def test_folders_and_files_behind_links_are_read(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / folder.MANIFEST).write_text(listing())
    (tmp_path / "pointer").write_text("3\n")
    root = tmp_path / "root"
    root.mkdir()
    (root / NAME).symlink_to(real)
    (root / folder.POINTER).symlink_to(tmp_path / "pointer")
    (tmp_path / "link").symlink_to(root)
    assert folder.candidates(tmp_path / "link") == [3]
    assert folder.problem_of(folder.folder_of(tmp_path / "link", 3)) is None


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """Return a file of the user; it must stay as it is."""
    file = tmp_path / "victim"
    file.write_text("dear to its owner")
    yield file
    assert file.read_text() == "dear to its owner"


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "folder", "file", "hard link"])
def test_a_lock_that_is_none_is_refused_and_left(kind: str, tmp_path: Path, victim: Path) -> None:
    own = tmp_path / "saves" / lock.LOCK
    own.parent.mkdir()
    match kind:
        case "link":
            own.symlink_to(victim)
        case "link to nothing":
            own.symlink_to(tmp_path / "new")
        case "pipe":
            os.mkfifo(own)
        case "folder":
            own.mkdir()
        case "file":
            own.write_text("notes of the user")
        case _:
            own.hardlink_to(victim)
    fault = "is a file of somebody else" if kind in ("file", "hard link") else f"is a {kind[:4]}"
    with pytest.raises(lock.NoLockError, match=f"{own} {fault}.* away|it$"), lock.held(own.parent):
        pass
    if kind not in ("file", "hard link"):  # a file's content is read when it is locked
        with pytest.raises(ValueError, match=f"^--save: {own} {fault}.* name another folder$"):
            check_outputs(LogSettings(), 0, own.parent)
    assert not (tmp_path / "new").exists()
    if kind == "file":
        assert own.read_text() == "notes of the user"


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_folder_of_the_user_is_not_emptied(kind: str, tmp_path: Path) -> None:
    user, own = tmp_path / "user", tmp_path / "out.unfinished"
    user.mkdir()
    (user / "0.bin").write_text("dear to its owner")
    if kind == "link":
        own.symlink_to(user)
    else:
        (user / "letter.txt").write_text("dear to its owner")
        user.rename(own)
    fault = "is a link" if kind == "link" else r"holds letter\.txt"
    with pytest.raises(ValueError, match=f"^{own} {fault}, so it is no folder"), held(own):
        pass
    for path in own.iterdir():
        assert path.read_text() == "dear to its owner"


def test_progress_is_not_appended_through_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / PROGRESS).symlink_to(victim)
    log = LogSettings(records=RecordSettings(progress_folder=tmp_path))
    with pytest.raises(ValueError, match=rf"--log-progress: .*{PROGRESS} is a link, not a file"):
        check_outputs(log, rank=0)
    with pytest.raises(OSError, match="it is a link, not a file"):
        ProgressFile(tmp_path).write(started())


def test_a_lock_of_the_cache_follows_no_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / ".made.lock").symlink_to(victim)
    with pytest.raises(OSError, match="it is a link, not a file"), locked(tmp_path / ".made.lock"):
        pass


def test_files_whose_names_a_run_makes_up_replace_links(tmp_path: Path, victim: Path) -> None:
    plan = make_plan("1f1b", "vocab-2", 2, 2)
    timeline = simulate(lower(plan))
    written: dict[str, Callable[[Path], None]] = {
        "run.planned.json": lambda path: save_timeline(timeline, path, is_own_name=True),
        "run.trace.json": lambda path: save_chrome_trace(plan, timeline, path),
        "state.json": lambda path: replace_text(path, "{}"),
    }
    for name, write in written.items():
        (tmp_path / name).symlink_to(victim)
        write(tmp_path / name)
        assert not (tmp_path / name).is_symlink()
        json.loads((tmp_path / name).read_text())
    (tmp_path / "named.json").symlink_to(tmp_path / "target.json")
    save_timeline(timeline, tmp_path / "named.json")  # the user named the link
    assert (tmp_path / "target.json").is_file()


def test_a_large_manifest_is_told_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / NAME
    where.mkdir()
    names = [f"__{number}_0.distcp" for number in range(10_000)]
    (where / folder.MANIFEST).write_text(listing(*names))
    monkeypatch.setattr(slow_work, "TELL_EVERY", 0.0)
    monkeypatch.setattr(files, "LARGE", 1000)
    reads: list[Path] = []
    read = folder.read_manifest

    def counted(of: Path) -> Any:
        reads.append(of)
        return read(of)

    monkeypatch.setattr(folder, "read_manifest", counted)
    assert not checkpoint.verify(where)  # all files are missing
    assert reads == [where]
    assert f"reading {where / folder.MANIFEST}: " in caplog.text
    assert f"entries of {where / folder.MANIFEST}: 8,192 of 10,000" in caplog.text
    reads.clear()
    assert storage.check_files(where, checkpoint.ALONE) is not None
    assert reads == [where]


def test_a_large_timeline_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow_work, "TELL_EVERY", 0.0)
    monkeypatch.setattr(files, "LARGE", 1000)
    path = tmp_path / "run.json"
    spans = [Span(0, "compute", f"F{i}", "F", i, 0, float(i), i + 1.0) for i in range(5000)]
    save_timeline(Timeline.of_lanes(1, spans), path)
    assert len(load_timeline(path).spans) == 5000
    assert f"reading {path}: " in caplog.text
    assert f"spans of {path}: 4,096 of 5,000" in caplog.text
