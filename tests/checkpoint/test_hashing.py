"""The digest of a file that was written is that of what lies on the disk."""

import errno
import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.serialization import get_crc32_options

from megatron.checkpoint import digests, folder, storage
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.digests import digest_of
from megatron.checkpoint.hashing import HashedFiles, HashedStream
from megatron.checkpoint.storage import SaveError
from megatron.parallel.box import whole
from megatron.parallel.groups import ConnectedAxis

ALONE = ConnectedAxis("world", 0, (0,))
SIZES = [0, 1, 4096, (1 << 20) - 1, 1 << 20, 3 << 20]


@settings(max_examples=examples(30))
@given(st.lists(st.sampled_from(SIZES), max_size=6))
def test_a_stream_knows_what_it_wrote(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    path = tmp_path_factory.mktemp("stream") / "file"
    parts = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    with HashedStream(path.open("wb")) as stream:
        for part in parts:
            assert stream.write(memoryview(part)) == len(part)
        assert stream.tell() == sum(sizes)
    content = path.read_bytes()
    assert content == b"".join(parts)
    assert stream.digest == digest_of(path)
    path.unlink()


def test_a_disk_that_is_full_is_told_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(OSError, match="No space left"), HashedStream(open("/dev/full", "wb")) as s:
        s.write(bytes(3 << 20))
    assert threading.active_count() == before


@pytest.mark.parametrize("files", [1, 3])
def test_the_manifest_of_a_save_is_right_without_reading_it_back(
    files: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tensors = {
        f"weight.{number}": BoxedTensor(torch.randn(64, size), (64, size), whole((64, size)))
        for number, size in enumerate((1, 50, 9000))
    }

    def not_again(path: Path, _: int) -> NoReturn:
        raise AssertionError(f"{path} is read")

    with monkeypatch.context() as patched:
        patched.setattr(digests, "_pieces", not_again)
        where = storage.write(tmp_path, 10, tensors, {"plan": "F0"}, ALONE, files)
    listed = folder.read_manifest(where)
    assert listed.keys() == {path.name for path in where.iterdir()} - {folder.MANIFEST}
    assert sum(name.endswith(".distcp") for name in listed) == files
    assert folder.problem_of(where) is None


def test_only_the_thread_that_writes_forms_no_crc(tmp_path: Path) -> None:
    seen = []
    with HashedFiles().create_stream(tmp_path / "file", "wb"):
        seen.append(get_crc32_options())
        other = threading.Thread(target=lambda: seen.append(get_crc32_options()))
        other.start()
        other.join()
    assert [*seen, get_crc32_options()] == [False, True, True]


def test_a_file_that_a_thread_could_not_write_is_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyTorch's own save would go on without it."""
    tensors = {
        f"weight.{number}": BoxedTensor(torch.ones(4), (4,), whole((4,))) for number in range(3)
    }
    fsync, main, failed = os.fsync, threading.main_thread(), threading.Event()

    def full(file: int) -> None:
        if threading.current_thread() is main:
            assert failed.wait(60), "another thread writes a file, too"
            return fsync(file)
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        patched.setattr(threading, "excepthook", lambda _: None)
        with pytest.raises(SaveError, match=r"a thread could not write its file: .*No space left"):
            storage.write(tmp_path, 10, tensors, {}, ALONE, 3)
    assert folder.complete(tmp_path) == []


def test_a_piece_that_cannot_be_written_is_the_reason_that_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyTorch would complain of the end of its archive, which cannot be written either."""
    write = HashedStream._write

    def full(stream: HashedStream, view: memoryview) -> int:
        if stream.tell() + len(view) > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(stream, view)

    monkeypatch.setattr(HashedStream, "_write", full)
    tensor = BoxedTensor(torch.ones(30_000), (30_000,), whole((30_000,)))
    with pytest.raises(SaveError, match=r"rank 0: .*No space left on device$"):
        storage.write(tmp_path, 10, {"weight.x": tensor}, {}, ALONE)
    assert folder.complete(tmp_path) == []
