"""The metadata of a large model: read whatever its size is, and told."""

import json
import logging
import os
import pickle
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from megatron.checkpoint import folder
from megatron.checkpoint.folder import DamagedError
from megatron.checkpoint.metadata import LARGEST, METADATA, read_metadata
from megatron.native import files

ROOM = 8 << 30


def written(root: Path) -> Path:
    """Write metadata without tensors, and the manifest that lists it; return the folder."""
    where = folder.folder_of(root, 3)
    where.mkdir()
    (where / METADATA).write_bytes(pickle.dumps(Metadata({}), protocol=4))
    listed = {METADATA: {"size": 1, "sha256": "0"}}
    manifest = {"format": 1, "iteration": 3, "files": listed}
    (where / folder.MANIFEST).write_text(json.dumps(manifest))
    return where


def test_metadata_of_gigabytes_is_read_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of ranks write a few MB each of it."""
    assert LARGEST >= ROOM
    where = written(tmp_path)
    size = (where / METADATA).stat().st_size
    monkeypatch.setattr(files, "LARGE", size)
    monkeypatch.setattr(files, "LARGEST_TEXT", size - 1)
    with caplog.at_level(logging.WARNING):
        assert read_metadata(where).state_dict_metadata == {}
    assert f"reading {where / METADATA}: 0 MB, which may take a while" in caplog.text


def test_more_is_refused_unread(tmp_path: Path) -> None:
    where = written(tmp_path)
    os.truncate(where / METADATA, LARGEST + 1)
    with pytest.raises(DamagedError, match=rf"{METADATA} cannot be read .*more than {LARGEST:,} b"):
        read_metadata(where)
