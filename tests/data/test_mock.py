"""Made-up samples: documents that count, decided by seed, split and number alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.datasets import Datasets, build_datasets
from megatron.data.mock import LONGEST_DOCUMENT
from megatron.data.samples import SampleDataset
from megatron.data.settings import DataSettings, DocumentSettings

EOD, VOCABULARY = 300, 301


def datasets(counts: tuple[int, int, int] = (50, 20, 5), **changes: Any) -> Datasets:
    values: dict[str, Any] = {
        "seq_length": 3000,
        "seed": 3,
        "resets": DocumentSettings(eod_token=EOD),
        "mock_data": True,
    }
    return build_datasets(DataSettings(**{**values, **changes}), counts, VOCABULARY)


def rows(dataset: SampleDataset | None) -> np.ndarray:
    assert dataset is not None
    out = np.full((len(dataset), dataset.seq_length + 1), -1, np.int64)
    for index, row in enumerate(out):
        dataset.read(index, row)
    return out


def test_documents_count_and_end() -> None:
    """A token is one more than the last, modulo the vocabulary, but around the end of one."""
    samples = rows(datasets((200, 0, 0)).train)
    last, following = samples[:, :-1], samples[:, 1:]
    counts = following == (last + 1) % VOCABULARY
    ends = following == EOD
    begins = (last == EOD) & (following == 1)
    assert (counts | ends | begins).all()
    assert ends.any()
    assert begins.any()


def test_documents_have_every_length() -> None:
    """Uniform up to the longest: whole ones of a long sample, whose mean is known."""
    [sample] = rows(
        datasets((1, 0, 0), seq_length=4_000_000, resets=DocumentSettings(eod_token=-5)).train
    )
    lengths = np.diff(np.flatnonzero(sample == -5))
    assert lengths.max() <= LONGEST_DOCUMENT
    deviation = LONGEST_DOCUMENT / np.sqrt(12 * len(lengths))
    assert abs(lengths.mean() - (LONGEST_DOCUMENT + 1) / 2) < 4 * deviation


def test_a_sample_depends_on_seed_split_and_number_alone() -> None:
    first = datasets()
    train, valid, test = (rows(dataset) for dataset in (first.train, first.valid, first.test))
    longer = rows(datasets((70, 5, 0)).train)
    assert np.array_equal(longer[:50], train)
    everything = np.concatenate([train, valid, test, rows(datasets(seed=4).train)])
    assert len(np.unique(everything, axis=0)) == len(everything)


def test_no_samples_no_dataset() -> None:
    assert datasets((1, 0, 0)).valid is None


@pytest.mark.parametrize("masked", [False, True])
def test_the_end_of_a_document_bears_no_loss_if_asked(masked: bool) -> None:
    train = datasets(eod_mask_loss=masked).train
    assert train is not None
    assert train.masked_token == (EOD if masked else None)


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path))
    rows(datasets().train)
    assert not list(tmp_path.iterdir())


def test_samples_beyond_32_bits_are_others() -> None:
    dataset = datasets((2**40, 0, 0)).train
    assert dataset is not None
    found = []
    for index in (5, 5 + 2**32, 5 + 2**33, 2**40 - 1):
        out = np.empty(dataset.seq_length + 1, np.int64)
        dataset.read(index, out)
        found.append(tuple(out))
    assert len(set(found)) == 4
    np.testing.assert_array_equal(found[0], rows(datasets((6, 0, 0)).train)[5])
