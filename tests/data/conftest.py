"""Small corpora, and one compiled index builder for all tests of the data package."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron.data.index_builder import IndexBuilder, load_index_builder
from megatron.data.indexed import IndexedDataset, IndexedWriter


@pytest.fixture(scope="session")
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def builder(compiler_cache: Path) -> IndexBuilder:
    return load_index_builder(compiler_cache)


@pytest.fixture
def write_corpus(tmp_path: Path) -> Callable[..., IndexedDataset]:
    """Writes documents of the given lengths; their tokens count up through the whole corpus."""

    def write(
        lengths: Sequence[int], name: str = "corpus", first: int = 0, vocab_size: int = 70000
    ) -> IndexedDataset:
        next_token = first
        with IndexedWriter(tmp_path / name, vocab_size) as writer:
            for length in lengths:
                writer.add_document(np.arange(next_token, next_token + length))
                next_token += length
        return IndexedDataset(tmp_path / name)

    return write
