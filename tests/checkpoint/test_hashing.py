"""The digest of a file that was written is that of what lies on the disk."""

import hashlib
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint import folder, storage
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.folder import FileDigest
from megatron.checkpoint.hashing import HashedStream
from megatron.parallel.box import whole
from megatron.parallel.groups import ConnectedAxis

ALONE = ConnectedAxis("world", 0, (0,))


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0, 1, 7, 4096, (1 << 20) - 1, 1 << 20, 3 << 20]), max_size=6))
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
    assert stream.digest == FileDigest(len(content), hashlib.sha256(content).hexdigest())
    assert stream.digest == folder.digest(path)
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

    def not_again(path: Path) -> FileDigest:
        raise AssertionError(f"{path} is read")

    with monkeypatch.context() as patched:
        patched.setattr(folder, "digest", not_again)
        where = storage.write(tmp_path, 10, tensors, {"plan": "F0"}, ALONE, files)
    listed = folder.read_manifest(where)
    assert listed.keys() == {path.name for path in where.iterdir()} - {folder.MANIFEST}
    assert sum(name.endswith(".distcp") for name in listed) == files
    folder.verify(where)
