"""Fixtures of whole jobs."""

from pathlib import Path

import pytest

from megatron.data.indexed import IndexedWriter


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that count upwards modulo 50, which a model soon learns."""
    prefix = tmp_path_factory.mktemp("corpus") / "counting"
    with IndexedWriter(prefix, 64) as writer:
        for document in range(200):
            writer.add_document([(document + i) % 50 for i in range(40)] + [63])
    return prefix
