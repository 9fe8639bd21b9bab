"""Whatever happens while checkpoints are written, a good one is found, and damage is named."""

import errno
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint import folder
from megatron.checkpoint.digests import digest_of
from megatron.checkpoint.folder import DamagedError

STEPS = ("open", "rename", "fsync", "mkdir", "rmdir", "unlink", "replace")


class Killed(BaseException):
    """Stands for SIGKILL: nothing that runs after it may tidy up."""


def save(root: Path, iteration: int, content: str = "") -> None:
    """Write a checkpoint of two files."""
    partial = folder.begin(root, iteration)
    files = {}
    for name in ("model.bin", "common.json"):
        path = partial / name
        path.write_text(f"{name} of {iteration} {content}" * 50)
        files[name] = digest_of(path)
    folder.finish(root, iteration, files)


def verify(where: Path, names: Iterable[str] | None = None) -> None:
    """Refuse a checkpoint whose files are not those of its manifest."""
    for problem in folder.problems(where, names):
        raise DamagedError(problem)


def read(root: Path) -> str:
    """What a job that starts now would load."""
    folder.clean_up(root)
    first = folder.candidates(root)[0]
    where = folder.folder_of(root, first)
    verify(where)
    return (where / "model.bin").read_text()


def kill_at(
    monkeypatch: pytest.MonkeyPatch, root: Path, number: int, work: Callable[[], None]
) -> bool:
    """Do ``work``, but end it at the file operation of this number; whether it came so far.

    From then on no operation on the file system does anything, as for a process that is dead.
    """
    count = 0

    def guarded(operation: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count > number:
                raise Killed
            return operation(*args, **kwargs)

        return run

    with monkeypatch.context() as patched:
        for name in STEPS:
            patched.setattr(os, name, guarded(getattr(os, name)))
        try:
            work()
        except Killed:
            return False
    return True


@pytest.mark.parametrize("again", [False, True], ids=["next", "same iteration again"])
def test_a_kill_at_any_moment_leaves_a_good_checkpoint(
    again: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    new = 10 if again else 20
    finished, number = False, 0
    seen = set()
    while not finished:
        root = tmp_path / str(number)
        save(root, 10, "old")
        finished = kill_at(monkeypatch, root, number, partial(save, root, new, "new"))
        seen.add(read(root).split()[3][:3])
        assert ("new" in read(root)) or not finished
        left = {path.name for path in root.iterdir()}
        assert left <= {folder.POINTER, "iter_0000010", "iter_0000020"} | {
            name for name in left if name.startswith(".")
        }
        number += 1
    assert number > 8, "the file operations were counted"
    assert seen == {"old", "new"}


def disk_error_at(
    monkeypatch: pytest.MonkeyPatch, number: int, *, lasts: bool, work: Callable[[], None]
) -> bool:
    """Do ``work`` on a disk whose operation of this number fails; return whether there was one.

    Args:
        monkeypatch: puts the fault in.
        number: of the operation.
        lasts: whether all later ones fail, too.
        work: may raise an ``OSError`` of its own accord.
    """
    count = 0

    def faulty(operation: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count - 1 == number or (lasts and count > number):
                raise OSError(errno.EIO, "Input/output error")
            return operation(*args, **kwargs)

        return run

    with monkeypatch.context() as patched, suppress(OSError):
        for name in STEPS:
            patched.setattr(os, name, faulty(getattr(os, name)))
        work()
    return count > number


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("again", [False, True], ids=["next", "same iteration again"])
def test_a_disk_error_at_any_operation_leaves_a_good_checkpoint(
    again: bool, lasts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a new job that would tidy up, unless the disk is gone for good."""
    new, number, failed = 10 if again else 20, 0, True
    while failed:
        root = tmp_path / str(number)
        save(root, 10, "old")

        def save_or_give_up(root: Path = root) -> None:
            try:
                save(root, new, "new")
            except OSError:
                folder.give_up(root, new)
                raise

        failed = disk_error_at(monkeypatch, number, lasts=lasts, work=save_or_give_up)
        if lasts:
            folder.clean_up(root)
        where = folder.folder_of(root, folder.candidates(root)[0])
        verify(where)
        assert lasts or not folder.partial_of(root, new).exists()
        number += 1
    assert number > 8, "the file operations were counted"


def test_a_disk_error_while_tidying_up_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(tmp_path, 10, "old")
    folder.begin(tmp_path, 20)
    folder.folder_of(tmp_path, 10).rename(tmp_path / "iter_0000010.replaced")
    told: list[str] = []
    disk_error_at(monkeypatch, 0, lasts=True, work=lambda: told.extend(folder.clean_up(tmp_path)))
    assert [line.partition(" stays as it is")[0] for line in told] == [
        str(tmp_path / "iter_0000010.replaced"),
        str(tmp_path / "iter_0000020.partial"),
    ]
    folder.clean_up(tmp_path)
    assert folder.candidates(tmp_path) == [10]


def test_a_kill_while_deleting_leaves_all_or_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finished, number = False, 0
    while not finished:
        root = tmp_path / str(number)
        save(root, 10)
        save(root, 20)
        finished = kill_at(monkeypatch, root, number, partial(folder.remove, root, 10))
        folder.clean_up(root)
        for iteration in folder.complete(root):
            verify(folder.folder_of(root, iteration))
        assert folder.candidates(root)[0] == 20
        number += 1
    assert folder.complete(root) == [20]


def test_the_pointer_decides_and_newer_ones_come_last(tmp_path: Path) -> None:
    for iteration in (10, 30, 40, 20):
        save(tmp_path, iteration)
    assert (tmp_path / folder.POINTER).read_text() == "20\n"
    assert folder.candidates(tmp_path) == [20, 10, 40, 30]
    (tmp_path / folder.POINTER).write_text("what?")
    assert folder.candidates(tmp_path) == [40, 30, 20, 10]
    (tmp_path / folder.POINTER).unlink()
    assert folder.candidates(tmp_path) == [40, 30, 20, 10]
    assert folder.candidates(tmp_path / "nowhere") == []


def damage(path: Path, kind: str, seed: int) -> None:
    """Do to a file what disks and people do."""
    content = bytearray(path.read_bytes())
    at = random.Random(seed).randrange(len(content))
    if kind == "flipped":
        content[at] ^= 1 << seed % 8
    elif kind == "truncated":
        del content[at:]
    elif kind == "longer":
        content += b"!"
    elif kind == "missing":
        path.unlink()
        return
    path.write_bytes(bytes(content))


def test_what_older_programs_wrote_is_verified(tmp_path: Path) -> None:
    """Their manifests hold the digest of the whole content."""
    save(tmp_path, 10)
    where = folder.folder_of(tmp_path, 10)
    names = ("model.bin", "common.json")
    contents = {name: (where / name).read_bytes() for name in names}
    older = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    (where / folder.MANIFEST).write_text(manifest(older))
    verify(where)
    damage(where / "model.bin", "flipped", 1)
    with pytest.raises(DamagedError, match=r"model\.bin is not what was written"):
        verify(where)


def test_a_manifest_of_format_2_is_verified(tmp_path: Path) -> None:
    """The program that formed SHA-256 of parts wrote this manifest."""
    where = folder.folder_of(tmp_path, 10)
    where.mkdir()
    shutil.copy(Path(__file__).with_name("manifest_of_format_2.json"), where / folder.MANIFEST)
    listed = folder.read_manifest(where)
    assert len(listed) == 5
    for name, entry in listed.items():
        pattern = bytes(range(251)) * (entry.size // 251 + 1)
        (where / name).write_bytes(pattern[: entry.size])
    verify(where)
    for name in set(listed) - {"empty.bin"}:
        damage(where / name, "flipped", 1)
        with pytest.raises(DamagedError, match=f"{name} is not what was written"):
            verify(where, [name])


@given(
    st.sampled_from(["model.bin", "common.json"]),
    st.sampled_from(["flipped", "truncated", "longer", "missing"]),
    st.integers(0, 10**6),
)
def test_every_damage_is_named(
    tmp_path_factory: pytest.TempPathFactory, name: str, kind: str, seed: int
) -> None:
    root = tmp_path_factory.mktemp("damaged")
    save(root, 10)
    where = folder.folder_of(root, 10)
    damage(where / name, kind, seed)
    with pytest.raises(DamagedError, match=name):
        verify(where)
    others = [other for other in ("model.bin", "common.json") if other != name]
    verify(where, others)
    shutil.rmtree(root)


def manifest(files: dict[str, Any], form: object = 1, iteration: object = 10) -> str:
    return json.dumps({"format": form, "iteration": iteration, "files": files})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"files": {"x": {}}}', "cannot be read"),
        ('{"files": {"x": 3}}', "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        (
            manifest({"../x": {"size": 1, "sha256": "0"}}),
            "'../x', which is no file of this folder",
        ),
        (manifest({"a\0b": {"size": 1, "sha256": "0"}}), "which is no file of this folder"),
        (manifest({"..": {"size": 1, "sha256": "0"}}), "'..', which is no file of this folder"),
        ('{"files": {}}', "cannot be read"),
        (manifest({}, form=4), "says format 4, and this program reads 1 to 3"),
        (manifest({}, form=None), "says format None, and this program reads 1 to 3"),
        (manifest({}, form=[]), "and this program reads 1 to 3"),
        (manifest({"a": {"size": 1, "sha256": "0"}}, form=3), "cannot be read"),
        (manifest({"a": {"size": 1, "blake3": "0"}}, form=2), "cannot be read"),
        (manifest({"a": 3}), "cannot be read"),
        (
            manifest({"a": {"size": 1, "sha256": "0", "part": 1}}, form=2),
            "a has a digest for every 1 bytes",
        ),
        (manifest({}, iteration=11), "is of iteration 11, and its folder of another one"),
        (manifest({}, iteration="10"), "is of iteration '10', and its folder of another one"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str, said: str) -> None:
    save(tmp_path, 10)
    where = folder.folder_of(tmp_path, 10)
    (where / folder.MANIFEST).write_text(text)
    with pytest.raises(DamagedError, match=said):
        verify(where)


def test_a_folder_under_another_name_is_refused(tmp_path: Path) -> None:
    for iteration in (10, 20):
        save(tmp_path, iteration)
    shutil.rmtree(folder.folder_of(tmp_path, 20))
    folder.folder_of(tmp_path, 10).rename(folder.folder_of(tmp_path, 20))
    with pytest.raises(DamagedError, match="is of iteration 10, and its folder of another one"):
        verify(folder.folder_of(tmp_path, 20))


@pytest.mark.parametrize("text", ["9" * 5000, "-1", "1.0", "\u0661\u0660", "release", ""])
def test_a_pointer_that_names_no_iteration_is_none(text: str, tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / folder.POINTER).write_text(text)
    assert folder.pointed_to(tmp_path) is None
    assert folder.candidates(tmp_path) == [10]


@pytest.mark.parametrize("name", [folder.POINTER, f"iter_0000010/{folder.MANIFEST}"])
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_makes_nobody_wait(name: str, kind: str, tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / name).unlink()
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).mkdir()
    assert folder.pointed_to(tmp_path) == (None if name == folder.POINTER else 10)
    said = str(folder.problem_of(folder.folder_of(tmp_path, 10)))
    assert (said == "None") == (name == folder.POINTER)
    assert name == folder.POINTER or f"{folder.MANIFEST} cannot be read" in said


def test_what_cannot_be_removed_is_told_and_does_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "iter_0000030.partial").write_text("a file of somebody else")
    [said] = folder.clean_up(tmp_path)
    assert "iter_0000030.partial stays as it is (" in said


@pytest.mark.parametrize("left", ["no manifest", "nothing"])
def test_a_checkpoint_that_lost_its_manifest_is_not_complete_but_named(
    left: str, tmp_path: Path
) -> None:
    for iteration in (10, 15, 20):
        save(tmp_path, iteration)
    for iteration in (15, 20):
        where = folder.folder_of(tmp_path, iteration)
        (where / folder.MANIFEST).unlink()
        if left == "nothing":
            shutil.rmtree(where)
        with pytest.raises(DamagedError, match="never finished"):
            verify(where)
    assert folder.complete(tmp_path) == [10]
    assert folder.candidates(tmp_path) == [20, 10], "the pointer says that there was one"
    assert "iter_0000020 has no manifest.json" in str(folder.problem_of(where))
    assert folder.problem_of(folder.folder_of(tmp_path, 10)) is None
