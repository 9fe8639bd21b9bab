"""From `DataSettings` to samples: splits, blends, and only what is asked for."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.datasets import build_datasets, split_ranges
from megatron.data.indexed import IndexedDataset
from megatron.data.samples import GPTDataset, SampleDataset
from megatron.data.settings import DataSettings, DocumentSettings
from megatron.data.shares import OwnPaths, Share, Split

Write = Callable[..., IndexedDataset]


@pytest.fixture(autouse=True)
def _compiled_once(compiler_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_CACHE", str(compiler_cache))


def config_of(*blend: tuple[float, IndexedDataset], **changes: Any) -> DataSettings:
    values: dict[str, Any] = {
        "blend": tuple((weight, source.prefix) for weight, source in blend),
        "split": Split(90, 8, 2),
        "seq_length": 8,
        "seed": 3,
        "resets": DocumentSettings(eod_token=1),
    }
    return DataSettings(**{**values, **changes})


def samples(dataset: SampleDataset | None, count: int) -> np.ndarray:
    assert dataset is not None
    out = np.empty((count, dataset.seq_length + 1), np.int64)
    for index, row in enumerate(out):
        dataset.read(index, row)
    return out


def test_splits_share_no_token(write_corpus: Write) -> None:
    source = write_corpus([30] * 50)
    datasets = build_datasets(config_of((1.0, source)), (100, 10, 3), 70000)
    train, valid, test = (
        set(samples(dataset, count).ravel().tolist())
        for dataset, count in (
            (datasets.train, 100),
            (datasets.valid, 10),
            (datasets.test, 3),
        )
    )
    assert max(train) < 45 * 30 <= min(valid)
    assert max(valid) < 49 * 30 <= min(test)


def test_a_single_corpus_is_not_wrapped(write_corpus: Write) -> None:
    datasets = build_datasets(config_of((0.3, write_corpus([30] * 50))), (10, 0, 0), 70000)
    assert type(datasets.train) is GPTDataset


def test_splits_not_asked_for_are_not_built_and_may_be_empty(write_corpus: Write) -> None:
    source = write_corpus([100])
    datasets = build_datasets(config_of((1.0, source)), (5, 0, 0), 70000)
    assert (datasets.valid, datasets.test) == (None, None)
    with pytest.raises(ValueError, match=r"^--data-path /.*too few for one sample"):
        build_datasets(config_of((1.0, source)), (5, 1, 0), 70000)


def test_a_corpus_that_is_too_short_is_told_by_the_flag_that_names_it(write_corpus: Write) -> None:
    sources = [write_corpus([100], f"c{number}") for number in range(2)]
    train, valid = ((Share(1.0, source.prefix),) for source in sources)
    config = config_of(
        own_paths=OwnPaths(train, (valid,)),
        named_by=(("--train-data-path", sources[0].prefix), ("--valid-data-path", valid[0].prefix)),
        seq_length=200,
    )
    for number, flag in enumerate(("--train-data-path", "--valid-data-path")):
        asked = (1 - number, number, 0)
        with pytest.raises(ValueError, match=f"^{flag} {sources[number].prefix}: a split of 1"):
            build_datasets(config, asked, 70000)


def test_blend_draws_by_weight_and_in_each_corpus_its_own_order(write_corpus: Write) -> None:
    sources = [write_corpus([30] * 20, f"c{i}", first=10000 * i) for i in range(3)]
    weights = (5.0, 3.0, 2.0)
    config = config_of(*zip(weights, sources, strict=True))
    drawn = samples(build_datasets(config, (100, 0, 0), 70000).train, 100)
    origin = drawn[:, 0] // 10000
    assert Counter(origin.tolist()) == {0: 50, 1: 30, 2: 20}
    for number, source in enumerate(sources):
        count = int((origin == number).sum())
        alone = build_datasets(config_of((1.0, source)), (count, 0, 0), 70000).train
        np.testing.assert_array_equal(drawn[origin == number], samples(alone, count))


def test_blend_of_more_corpora_than_samples(write_corpus: Write) -> None:
    sources = [write_corpus([30] * 20, f"c{i}", first=10000 * i) for i in range(3)]
    config = config_of(*zip((1.0, 1.0, 9.0), sources, strict=True))
    dataset = build_datasets(config, (1, 0, 0), 70000).train
    assert dataset is not None
    assert len(dataset) == 1
    assert samples(dataset, 1).min() >= 20000


def test_eod_masking_follows_the_config(write_corpus: Write) -> None:
    source = write_corpus([30] * 20)
    for eod_mask_loss, expected in ((False, None), (True, 1)):
        config = config_of((1.0, source), eod_mask_loss=eod_mask_loss)
        dataset = build_datasets(config, (5, 0, 0), 70000).train
        assert dataset is not None
        assert dataset.masked_token == expected


@pytest.mark.parametrize("chosen", [True, False])
def test_indices_lie_where_the_config_says(
    write_corpus: Write, tmp_path: Path, chosen: bool
) -> None:
    cache = tmp_path / "chosen" if chosen else None
    build_datasets(
        config_of((1.0, write_corpus([30] * 9)), data_cache_path=cache), (5, 0, 0), 70000
    )
    folder = cache or tmp_path / "sample_indices"
    assert {path.name.rsplit("-")[-1] for path in folder.iterdir()} == {
        "checksums.json",
        "documents.npy",
        "samples.npy",
        "shuffle.npy",
    }


@given(
    st.integers(0, 5000),
    st.lists(st.floats(0, 1000), min_size=3, max_size=3).filter(lambda split: sum(split) > 0.1),
)
def test_split_ranges_tile_the_corpus_in_proportion(count: int, split: list[float]) -> None:
    ranges = split_ranges(count, split)
    assert [index for part in ranges for index in part] == list(range(count))
    for part, share in zip(ranges, split, strict=True):
        assert abs(len(part) - count * share / sum(split)) <= 1 + 1e-6


@pytest.mark.parametrize(
    "split", [(0.0, 0.0, 0.0), (1.0, -0.1, 0.0), (float("nan"), 1.0, 0.0), (float("inf"), 1, 0)]
)
def test_senseless_split_is_refused(split: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match=r"--split .*for example 949,50,1"):
        split_ranges(10, split)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_senseless_weight_is_refused(write_corpus: Write, weight: float) -> None:
    source = write_corpus([30] * 20)
    with pytest.raises(ValueError, match="--data-path weights"):
        build_datasets(config_of((1.0, source), (weight, source)), (5, 0, 0), 70000)


def test_empty_blend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--data-path is empty.*tools/sample_data\.py"):
        build_datasets(config_of(), (5, 0, 0), 70000)


def own(*shares: Share) -> dict[str, Any]:
    """Every split reads these."""
    return {"blend": (), "own_paths": OwnPaths(shares, (shares,), shares)}


def test_splits_with_corpora_of_their_own_read_all_of_them(write_corpus: Write) -> None:
    """As Megatron-LM's ``blend_per_split``: what a split of 1,0,0 gives to training."""
    source = write_corpus([30] * 20)
    shared = config_of((1.0, source), split=Split(1, 0, 0))
    whole = samples(build_datasets(shared, (90, 0, 0), 70000).train, 90).tobytes()
    datasets = build_datasets(config_of(**own(Share(1.0, source.prefix))), (90, 90, 90), 70000)
    for dataset in (datasets.train, datasets.valid, datasets.test):
        assert samples(dataset, 90).tobytes() == whole


def test_a_share_of_a_corpus_is_its_documents_between_two_marks(write_corpus: Write) -> None:
    source = write_corpus([30] * 20)
    datasets = build_datasets(
        config_of(**own(Share(1.0, source.prefix, 0.25, 0.5))), (40, 0, 0), 70000
    )
    drawn = samples(datasets.train, 40)
    assert drawn.min() == 5 * 30
    assert drawn.max() == 10 * 30 - 1


def test_every_validation_set_is_a_dataset(write_corpus: Write) -> None:
    sources = [write_corpus([30] * 20, f"c{i}", first=10000 * i) for i in range(3)]
    shares = [(Share(1.0, source.prefix),) for source in sources]
    config = config_of(blend=(), own_paths=OwnPaths(shares[0], tuple(shares)))
    datasets = build_datasets(config, (5, 7, 0), 70000)
    for number, dataset in enumerate((datasets.valid, *datasets.more_valid)):
        assert set((samples(dataset, 7) // 10000).ravel().tolist()) == {number}


@pytest.mark.parametrize("documents", [[30] * 20, [9], [8, 1, 40]])
def test_a_set_that_is_read_once_has_every_whole_sample_once(
    write_corpus: Write, documents: list[int]
) -> None:
    source = write_corpus(documents)
    dataset = build_datasets(config_of(**own(Share(1.0, source.prefix))), (1, None, 0), 70000).valid
    assert dataset is not None
    assert len(dataset) == (sum(documents) - 1) // 8
    inputs = samples(dataset, len(dataset))[:, :-1]
    assert len(set(inputs.ravel().tolist())) == inputs.size == len(dataset) * 8
