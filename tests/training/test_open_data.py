"""The samples that a run reads, and the test set that a small corpus does not have."""

import dataclasses
from typing import Any

import pytest
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.data.indexed import IndexedWriter
from megatron.data.microbatch import MicrobatchLoader, PrefetchingLoader
from megatron.data.settings import DataSettings
from megatron.data.shares import EvaluationSet, OwnPaths, Share, Split
from megatron.run.train import TrainSettings
from megatron.training.open_data import evaluations_of_validation, open_data

JOB = Job(GPTOptions(vocab_size=50), microbatches=2, iterations=7)
BOTH: tuple[EvaluationSet, ...] = ("validation", "test")


def train_config(interval: int | None, sets: tuple[EvaluationSet, ...]) -> TrainSettings:
    config = JOB.config(Layout(1, "none")).train
    return dataclasses.replace(config, eval_interval=interval, final_sets=sets)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSettings:
    """A hundred documents: the default split leaves none of them for tests."""
    prefix = tmp_path_factory.mktemp("corpus") / "small"
    with IndexedWriter(prefix, 50) as writer:
        for document in range(100):
            writer.add_document([document % 50] * 20)
    return DataSettings(seq_length=JOB.sequence, seed=0, blend=((1.0, prefix),))


def samples(loader: object) -> int:
    return len(vars(loader)["_dataset"])


def test_the_end_is_one_evaluation_more() -> None:
    assert evaluations_of_validation(train_config(3, BOTH)) == 3
    assert evaluations_of_validation(train_config(3, ("test",))) == 2
    assert evaluations_of_validation(train_config(None, BOTH)) == 1
    assert evaluations_of_validation(train_config(None, ())) == 0


def test_every_set_has_the_samples_that_are_read(data: DataSettings) -> None:
    even = dataclasses.replace(data, split=Split(1, 1, 1))
    opened = open_data(even, train_config(3, BOTH), 50)
    assert opened.test is not None
    [validation] = opened.validation.values()
    assert samples(validation) >= 3 * 2 * 2  # evaluations, batches, samples of a batch
    assert samples(opened.test) >= 2 * 2
    assert opened.notes == ()
    for _ in range(2):
        opened.test.next_batch()


def test_without_documents_the_test_set_is_left_out_and_told(data: DataSettings) -> None:
    opened = open_data(data, train_config(3, BOTH), 50)
    assert [*opened.validation] == ["validation"]
    assert opened.test is None
    [note] = opened.notes
    assert note.startswith("the test set is not evaluated: ")
    assert "--split" in note


def test_it_is_missed_if_nothing_else_is_evaluated(data: DataSettings) -> None:
    with pytest.raises(ValueError, match="--split"):
        open_data(data, train_config(None, ("test",)), 50)


def test_nobody_who_does_not_ask_for_it_has_one(data: DataSettings) -> None:
    opened = open_data(data, train_config(None, ()), 50)
    assert (opened.validation, opened.test, opened.notes) == ({}, None, ())


def own_paths(data: DataSettings, sets: int, **changes: Any) -> DataSettings:
    """The corpus for training, and so many halves of it to validate on."""
    prefix = data.blend[0][1]
    halves = tuple((Share(1.0, prefix, i / 2, (i + 1) / 2),) for i in range(sets))
    names = tuple(map(str, range(sets))) if sets > 1 else ()
    paths = OwnPaths((Share(1.0, prefix),), halves, valid_names=names)
    return dataclasses.replace(data, blend=(), own_paths=paths, **changes)


def test_several_validation_sets_have_names_and_a_note_each(data: DataSettings) -> None:
    opened = open_data(own_paths(data, 2), train_config(3, ("validation",)), 50)
    assert [*opened.validation] == ["validation-0", "validation-1"]
    assert [note.split(" is ")[0] for note in opened.notes] == ["validation-0", "validation-1"]
    assert all(samples(loader) >= 3 * 2 * 2 for loader in opened.validation.values())


def test_a_validation_set_that_is_read_whole(data: DataSettings) -> None:
    """Fifty documents of 20 tokens make 99 samples of 10, and 49 batches of two."""
    train = train_config(3, ("validation",))
    opened = open_data(own_paths(data, 1, full_validation=True), train, 50)
    [(name, loader)] = opened.validation.items()
    assert (name, loader.samples, loader.whole_batches) == ("validation", 99, 49)
    assert opened.notes == (
        "an evaluation of validation reads 49 batches, without its last 1 sample",
    )


def test_a_set_that_fills_no_batch_cannot_be_read_whole(data: DataSettings) -> None:
    train = train_config(3, ("validation",))
    small = own_paths(data, 1, full_validation=True, seq_length=900)
    with pytest.raises(ValueError, match=r"--full-validation: validation has 1 sample.*lower"):
        open_data(small, train, 50)


def test_training_samples_may_be_read_ahead(data: DataSettings) -> None:
    for prefetch, kind in ((False, MicrobatchLoader), (True, PrefetchingLoader)):
        config = dataclasses.replace(data, prefetch=prefetch)
        assert type(open_data(config, train_config(None, ()), 50).train) is kind
