"""The samples that a run reads, and the test set that a small corpus does not have."""

import dataclasses

import pytest
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.config.run_config import EvaluationSet, TrainConfig
from megatron.data.config import DataConfig
from megatron.data.indexed import IndexedWriter
from megatron.training.open_data import evaluations_of_validation, open_data

JOB = Job(GPTOptions(vocab_size=50), microbatches=2, iterations=7)
BOTH: tuple[EvaluationSet, ...] = ("validation", "test")


def train_config(interval: int | None, sets: tuple[EvaluationSet, ...]) -> TrainConfig:
    config = JOB.config(Layout(1, "none")).train
    return dataclasses.replace(config, eval_interval=interval, final_sets=sets)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """A hundred documents: the default split leaves none of them for tests."""
    prefix = tmp_path_factory.mktemp("corpus") / "small"
    with IndexedWriter(prefix, 50) as writer:
        for document in range(100):
            writer.add_document([document % 50] * 20)
    return DataConfig(((1.0, prefix),), (969, 30, 1), JOB.sequence, seed=0, eod_token=0)


def samples(loader: object) -> int:
    return len(vars(loader)["_dataset"])


def test_the_end_is_one_evaluation_more() -> None:
    assert evaluations_of_validation(train_config(3, BOTH)) == 3
    assert evaluations_of_validation(train_config(3, ("test",))) == 2
    assert evaluations_of_validation(train_config(None, BOTH)) == 1
    assert evaluations_of_validation(train_config(None, ())) == 0


def test_every_set_has_the_samples_that_are_read(data: DataConfig) -> None:
    even = dataclasses.replace(data, split=(1, 1, 1))
    opened = open_data(even, train_config(3, BOTH), 50)
    assert opened.valid is not None
    assert opened.test is not None
    assert samples(opened.valid) >= 3 * 2 * 2  # evaluations, batches, samples of a batch
    assert samples(opened.test) >= 2 * 2
    assert opened.notes == ()
    for _ in range(2):
        opened.test.next_batch()


def test_without_documents_the_test_set_is_left_out_and_told(data: DataConfig) -> None:
    opened = open_data(data, train_config(3, BOTH), 50)
    assert opened.valid is not None
    assert opened.test is None
    [note] = opened.notes
    assert note.startswith("the test set is not evaluated: ")
    assert "--split" in note


def test_it_is_missed_if_nothing_else_is_evaluated(data: DataConfig) -> None:
    with pytest.raises(ValueError, match="--split"):
        open_data(data, train_config(None, ("test",)), 50)


def test_nobody_who_does_not_ask_for_it_has_one(data: DataConfig) -> None:
    opened = open_data(data, train_config(None, ()), 50)
    assert (opened.valid, opened.test, opened.notes) == (None, None, ())
