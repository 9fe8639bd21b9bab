"""A run that goes on in other data than it has begun with says so, and only then."""

from pathlib import Path

import pytest

from megatron.data.datasets import build_datasets
from megatron.data.indexed import IndexedWriter
from megatron.data.microbatch import MicrobatchLoader
from megatron.data.settings import DataSettings, DocumentSettings
from megatron.data.shares import Split
from megatron.training.progress import Progress

SEQUENCE, BATCH = 8, 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 41 tokens that are all different: 102 samples an epoch."""
    prefix = tmp_path_factory.mktemp("corpus") / "numbers"
    with IndexedWriter(prefix, 1000) as writer:
        for document in range(20):
            writer.add_document([41 * document + i for i in range(41)])
    return prefix


def loader(corpus: Path, samples: int, seed: int = 1) -> MicrobatchLoader:
    """What a run reads that asks for so many samples."""
    config = DataSettings(
        split=Split(1, 0, 0),
        data_cache_path=corpus.parent,
        seq_length=SEQUENCE,
        seed=seed,
        resets=DocumentSettings(eod_token=999),
        blend=((1.0, corpus),),
    )
    train = build_datasets(config, (samples, 0, 0), 1000).train
    assert train is not None
    return MicrobatchLoader(train, 1, BATCH)


def after(corpus: Path, samples: int, batches: int) -> Progress:
    """The progress of a run that asks for so many samples, after some batches."""
    own = loader(corpus, samples)
    for _ in range(batches):
        own.next_batch()
    return Progress.after(batches, own, samples)


def test_more_samples_of_the_same_epochs_come_in_the_same_order(corpus: Path) -> None:
    progress = after(corpus, 40, batches=5)
    assert progress.consumed_samples == 20
    assert progress.other_order(loader(corpus, 40), 40) is None
    assert progress.other_order(loader(corpus, 100), 100) is None


def test_another_number_of_epochs_is_another_order(corpus: Path) -> None:
    progress = after(corpus, 40, batches=5)
    note = progress.other_order(loader(corpus, 400), 400)
    assert note is not None
    assert "(--train-iters), 40 before and 400 now" in note
    assert "--exit-interval" in note


def test_another_seed_is_another_order(corpus: Path) -> None:
    note = after(corpus, 40, batches=5).other_order(loader(corpus, 40, seed=2), 40)
    assert note is not None
    assert "--train-iters" not in note
    assert "--seed" in note


def test_what_is_not_known_is_not_told(corpus: Path) -> None:
    data = loader(corpus, 40)
    assert Progress().other_order(data, 40) is None
    assert Progress(5, 20).other_order(data, 40) is None
    assert Progress(5000, 20_000, "a digest", 40).other_order(data, 40) is None, "the data end"
    assert data.digest(-1) == ""
    assert data.digest(3) != data.digest(4)
