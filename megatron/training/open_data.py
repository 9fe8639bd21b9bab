"""Opens the data of a run: exactly the samples that training and its evaluations will read."""

from dataclasses import dataclass

from megatron.config.run_config import TrainConfig
from megatron.data.config import DataConfig
from megatron.data.datasets import build_datasets
from megatron.data.microbatch import MicrobatchLoader
from megatron.data.samples import SampleDataset


@dataclass(frozen=True)
class Data:
    """Microbatches of a run; every rank of a replica reads the same ones.

    Attributes:
        train: microbatches of the training iterations.
        valid: microbatches of the evaluations; ``None`` if there are no evaluations.
        test: microbatches of the evaluation of the test set at the end; ``None`` if there is none.
        notes: lines about what is left out.
    """

    train: MicrobatchLoader
    valid: MicrobatchLoader | None
    test: MicrobatchLoader | None = None
    notes: tuple[str, ...] = ()


def open_data(config: DataConfig, train: TrainConfig, vocab_size: int, replica: int = 0) -> Data:
    """Index the samples that the run will read. Needs no other rank.

    Args:
        config: corpus and sampling.
        train: length and batches of the run.
        vocab_size: entries of the vocabulary; every token must be below it.
        replica: number of this rank's replica.

    Raises:
        FileNotFoundError: a corpus is missing.
        ValueError: a corpus is damaged, or a split is too short for one sample.
    """
    validation = evaluations_of_validation(train) * train.eval_iters * train.global_batch_size
    datasets = build_datasets(config, (train.dataset_samples, validation, 0), vocab_size)
    test, notes = _test_set(config, train, vocab_size)

    def loader(dataset: SampleDataset) -> MicrobatchLoader:
        return MicrobatchLoader(
            dataset,
            train.micro_batch_size,
            train.num_microbatches,
            replica=(replica, train.replicas),
            documents=config.documents,
        )

    assert datasets.train is not None
    return Data(
        loader(datasets.train),
        loader(datasets.valid) if datasets.valid else None,
        loader(test) if test else None,
        notes,
    )


def evaluations_of_validation(train: TrainConfig) -> int:
    """Return how often a whole job evaluates the validation set."""
    between = train.train_iters // train.eval_interval if train.eval_interval else 0
    return between + ("validation" in train.final_sets)


def _test_set(
    config: DataConfig, train: TrainConfig, vocab_size: int
) -> tuple[SampleDataset | None, tuple[str, ...]]:
    """Return the test set, and a line if there is none.

    The default split leaves a thousandth of the documents to it, of a small corpus none. So it is
    left out, unless nothing else is evaluated.
    """
    if "test" not in train.final_sets:
        return None, ()
    samples = train.eval_iters * train.global_batch_size
    try:
        return build_datasets(config, (0, 0, samples), vocab_size).test, ()
    except ValueError as error:
        if train.final_sets == ("test",):
            raise
        return None, (f"the test set is not evaluated: {error}",)
