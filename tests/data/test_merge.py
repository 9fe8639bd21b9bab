"""Merged files are what megatron-core's ``add_index`` writes: sequence for sequence."""

import errno
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from data import raw_text
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.indexed import IndexedDataset, IndexedWriter
from megatron.data.preparation import index_merge
from megatron.data.preparation.index_merge import merge, prefixes_of

TOOL = Path(__file__).resolve().parents[2] / "tools" / "merge_datasets.py"
GOLDEN = Path(__file__).with_name("golden") / "megatron_core_0.16.1"


def pair(prefix: Path, texts: list[raw_text.Text], vocabulary: int = raw_text.VOCABULARY) -> Path:
    tokens, index = raw_text.expected(texts, vocabulary=vocabulary)
    Path(f"{prefix}.bin").write_bytes(tokens)
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix


def content(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@given(
    ends=st.lists(st.integers(0, 40), max_size=4).map(sorted),
    vocabulary=st.sampled_from([1000, 70000]),
)
@settings(max_examples=examples(30), deadline=None)
def test_parts_merge_to_the_whole(
    tmp_path_factory: pytest.TempPathFactory, ends: list[int], vocabulary: int
) -> None:
    """Cut between any documents, also to nothing."""
    folder = tmp_path_factory.mktemp("parts")
    texts = raw_text.numbers(40, vocabulary)
    bounds = [0, *ends, 40]
    parts = [
        pair(folder / f"part{n}", texts[begin:end], vocabulary)
        for n, (begin, end) in enumerate(pairwise(bounds))
    ]
    merge(parts, folder / "whole")
    assert content(folder / "whole") == raw_text.expected(texts, vocabulary=vocabulary)


def test_the_merged_files_are_those_that_megatron_core_writes(tmp_path: Path) -> None:
    """The golden files were made by golden/make.py with megatron-core 0.16.1."""
    once = GOLDEN / "1000_text_document"
    merge([once, once, once], tmp_path / "merged")
    assert content(tmp_path / "merged") == content(GOLDEN / "1000_text_document_three_times")


def test_large_indices_are_written_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.data.index_file._BLOCK", 3)
    texts = raw_text.numbers(40)
    parts = [pair(tmp_path / "a", texts[:17]), pair(tmp_path / "b", texts[17:])]
    merge(parts, tmp_path / "whole")
    assert content(tmp_path / "whole") == raw_text.expected(texts)


def test_of_a_folder_all_pairs_are_merged_by_name(tmp_path: Path) -> None:
    texts = raw_text.numbers(30)
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, begin in (("b.x", 10), ("a", 0), ("c", 20)):
        pair(parts / name, texts[begin : begin + 10])
    command = [sys.executable, str(TOOL), "--input", str(parts)]
    command += ["--output-prefix", str(tmp_path / "whole")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, f"DATA_PATH={tmp_path / 'whole'}\n"), run.stderr
    assert content(tmp_path / "whole") == raw_text.expected(texts)
    (parts / "c.bin").unlink()
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"error: --input {parts / 'c'}: {parts / 'c.bin'} does not exist")


def test_ids_of_two_dtypes_are_not_merged(tmp_path: Path) -> None:
    parts = [pair(tmp_path / "a", ["1"]), pair(tmp_path / "b", ["1"], 70000)]
    with pytest.raises(ValueError, match=r"a holds ids of uint16 and .*b of int32"):
        merge(parts, tmp_path / "whole")
    assert not list(tmp_path.glob("*whole*"))


def test_a_damaged_part_is_named_before_anything_is_written(tmp_path: Path) -> None:
    parts = [pair(tmp_path / "a", ["1 2 3"]), pair(tmp_path / "b", ["1"])]
    (tmp_path / "b.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"^--input {parts[1]}: .*b\.bin has 0 bytes"):
        merge(parts, tmp_path / "whole")
    assert not list(tmp_path.glob("*whole*"))


def test_the_output_is_none_of_the_inputs_and_has_a_folder(tmp_path: Path) -> None:
    part = pair(tmp_path / "a", ["1"])
    with pytest.raises(ValueError, match="is one of the --input"):
        merge([part, part], tmp_path / "." / "a")
    with pytest.raises(ValueError, match="its folder does not exist"):
        merge([part], tmp_path / "no" / "a")
    with pytest.raises(ValueError, match=r"no \.bin and \.idx files"):
        prefixes_of(Path(__file__).parent / "golden")


def test_a_full_disk_leaves_the_old_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = pair(tmp_path / "a", ["1 2"])
    with IndexedWriter(tmp_path / "whole", 100) as writer:
        writer.add_document([5])
    before = content(tmp_path / "whole")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(index_merge, "write_index", full)
    with pytest.raises(ValueError, match=r"--output-prefix .*No space left.*make room"):
        merge([part], tmp_path / "whole")
    assert content(tmp_path / "whole") == before
    assert len(list(tmp_path.iterdir())) == 4
    monkeypatch.undo()
    assert merge([part], tmp_path / "whole") == (1, 3)
    assert len(IndexedDataset(tmp_path / "whole")) == 1
