"""The on-disk format, byte for byte, and what a reader does with files that are not it."""

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.indexed import IndexedDataset, IndexedWriter


def write_by_hand(
    prefix: Path,
    documents: list[list[int]],
    dtype: str = "<u2",
    code: int = 8,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
) -> None:
    """The format as Megatron-LM documents it, written without the code under test."""
    pointers, lengths, body = [], [], b""
    for document in documents:
        pointers.append(len(body))
        lengths.append(len(document))
        body += np.array(document, dtype).tobytes()
    n = len(documents)
    head = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    head += struct.pack("<QQ", n, n + 1) + struct.pack(f"<{n}i", *lengths)
    head += struct.pack(f"<{n}q", *pointers) + struct.pack(f"<{n + 1}q", *range(n + 1))
    Path(f"{prefix}.bin").write_bytes(body)
    Path(f"{prefix}.idx").write_bytes(head)


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "code"),
    [(32000, "<u2", 8), (65499, "<u2", 8), (65500, "<i4", 4), (256000, "<i4", 4)],
)
def test_writer_makes_the_documented_bytes(
    tmp_path: Path, vocab_size: int, dtype: str, code: int
) -> None:
    documents = [[1, 2, 3], [], [vocab_size - 1], [0, 5]]
    write_by_hand(tmp_path / "hand", documents, dtype, code)
    with IndexedWriter(tmp_path / "ours", vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
    for ending in (".bin", ".idx"):
        expected = (tmp_path / f"hand{ending}").read_bytes()
        assert (tmp_path / f"ours{ending}").read_bytes() == expected


@pytest.mark.parametrize(
    ("dtype", "code"), [("<u1", 1), ("<i1", 2), ("<i2", 3), ("<i4", 4), ("<i8", 5), ("<u2", 8)]
)
def test_reader_knows_every_integer_dtype(tmp_path: Path, dtype: str, code: int) -> None:
    documents = [[7, 8, 9], [], [100]]
    write_by_hand(tmp_path / "corpus.v1", documents, dtype, code)
    dataset = IndexedDataset(tmp_path / "corpus.v1")
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents
    assert dataset.lengths.tolist() == [3, 0, 1]
    assert dataset.document_indices.tolist() == [0, 1, 2, 3]
    assert dataset.read(0, 1, 3).tolist() == [8, 9]


@given(st.lists(st.lists(st.integers(0, 69999), max_size=20), max_size=10))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    prefix = tmp_path_factory.mktemp("round") / "trip"
    with IndexedWriter(prefix, 70000) as writer:
        for document in documents:
            writer.add_document(document)
    dataset = IndexedDataset(prefix)
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents


def test_mapped_tokens_cannot_be_written(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "x", [[1, 2]])
    with pytest.raises(ValueError, match="read-only"):
        IndexedDataset(tmp_path / "x")[0][0] = 5


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_missing_file_is_named(tmp_path: Path, ending: str) -> None:
    write_by_hand(tmp_path / "x", [[1, 2]])
    (tmp_path / f"x{ending}").unlink()
    with pytest.raises(FileNotFoundError, match=rf"--data-path: .*x\{ending} does not exist"):
        IndexedDataset(tmp_path / "x")


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "x", [[1, 2]], magic=b"TNTIDX\x00\x00\x00")
    with pytest.raises(ValueError, match=r"x\.idx is no Megatron-LM index: it starts with b'TNTI"):
        IndexedDataset(tmp_path / "x")


def test_other_version_is_refused(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "x", [[1, 2]], version=2)
    with pytest.raises(ValueError, match="has version 2, this reads 1"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize(("code", "found"), [(7, "float32"), (6, "float64"), (99, "unknown")])
def test_dtypes_that_hold_no_tokens_are_refused(tmp_path: Path, code: int, found: str) -> None:
    write_by_hand(tmp_path / "x", [[1, 2]], code=code)
    with pytest.raises(ValueError, match=rf"dtype code {code} \({found}\)"):
        IndexedDataset(tmp_path / "x")


def test_every_truncation_of_the_index_is_refused(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "x", [[1, 2], [3]])
    whole = (tmp_path / "x.idx").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "x.idx").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"truncated|no Megatron-LM index"):
            IndexedDataset(tmp_path / "x")


def test_index_with_more_than_its_counts_is_refused(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "x", [[1, 2], [3]])
    with (tmp_path / "x.idx").open("ab") as file:
        file.write(b"\0\0")
    with pytest.raises(ValueError, match="too long"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("change", [-2, -1, 2])
def test_bin_of_another_size_is_refused(tmp_path: Path, change: int) -> None:
    write_by_hand(tmp_path / "x", [[1, 2], [3]])
    whole = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes((whole + b"\0\0")[: len(whole) + change])
    with pytest.raises(ValueError, match=rf"has {6 + change} bytes where .* promises 6"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize(
    ("position", "what"), [(34, "pointers"), (42, "pointers"), (58, "documents"), (74, "documents")]
)
def test_self_contradiction_is_refused(tmp_path: Path, position: int, what: str) -> None:
    write_by_hand(tmp_path / "x", [[1, 2], [3]])
    damaged = bytearray((tmp_path / "x.idx").read_bytes())
    damaged[position] ^= 0x7
    (tmp_path / "x.idx").write_bytes(bytes(damaged))
    with pytest.raises(ValueError, match=f"damaged: its {what}"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("token", [-1, 100, 1 << 40])
def test_writer_refuses_ids_outside_the_vocabulary(tmp_path: Path, token: int) -> None:
    with (
        pytest.raises(ValueError, match="outside the vocabulary of 100 entries"),
        IndexedWriter(tmp_path / "x", 100) as writer,
    ):
        writer.add_document([1, token])
    assert list(tmp_path.iterdir()) == []


def test_interrupted_writer_leaves_the_old_pair(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "x", [[1, 2]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted() -> None:
        with IndexedWriter(tmp_path / "x", 100) as writer:
            writer.add_document([5])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_until_the_last_rename_there_is_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every rename, what a reader would find is nothing or the whole new pair."""
    write_by_hand(tmp_path / "x", [[1, 2]])
    seen = []
    rename = Path.replace

    def watch(self: Path, target: Path) -> Path:
        seen.append((target.name, (tmp_path / "x.idx").exists()))
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", watch)
    with IndexedWriter(tmp_path / "x", 100) as writer:
        writer.add_document([5])
    assert seen == [("x.bin", False), ("x.idx", False)]
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [5]


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_by_hand(tmp_path / "x", [[1]])

    def denied(path: str, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ValueError, match=r"x\.idx cannot be read \(Permission denied\): let this"):
        IndexedDataset(tmp_path / "x")


def test_a_folder_of_its_name_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.idx").mkdir()
    with pytest.raises(FileNotFoundError, match=r"x\.idx is no file"):
        IndexedDataset(tmp_path / "x")


def test_an_index_of_nothing_is_read(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", 100):
        pass
    assert len(IndexedDataset(tmp_path / "x")) == 0


def test_documents_that_run_backwards_are_refused(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "x", [[1, 2], [3], [4]])
    whole = bytearray((tmp_path / "x.idx").read_bytes())
    whole[-16:-8] = (9).to_bytes(8, "little")
    (tmp_path / "x.idx").write_bytes(whole)
    with pytest.raises(ValueError, match="damaged: its documents"):
        IndexedDataset(tmp_path / "x")
