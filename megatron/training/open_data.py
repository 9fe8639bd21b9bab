"""Opens the data of a run: exactly the samples that training and its evaluations will read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from megatron.data.corpus_watch import CorpusWatch
from megatron.data.datasets import build_datasets
from megatron.data.microbatch import MicrobatchLoader, PrefetchingLoader
from megatron.data.samples import SampleDataset
from megatron.data.settings import DataSettings
from megatron.parallel.grid import Coordinates
from megatron.parallel.launchers import local_rank
from megatron.run.train import TrainSettings
from megatron.schedules.counted import counted
from megatron.training.open_prompts import Prompts

_ALONE: Final = Coordinates(tensor=0, data=0, pipeline=0)


@dataclass(frozen=True)
class Data:
    """The microbatches of a run, as this rank reads them.

    In a replica, all ranks with the same part of the sequence read the same microbatches.

    Attributes:
        train: microbatches of the training iterations.
        validation: microbatches of every set that is evaluated, by its name in the log.
        test: microbatches of the evaluation of the test set at the end; ``None`` if there is none.
        corpora: the files of all corpora, and how they are when the run begins.
        notes: lines about sets or samples that are left out, and about names of validation sets.
        prompts: from which texts go on that the model writes; ``None``: it writes none.
    """

    train: MicrobatchLoader
    validation: Mapping[str, MicrobatchLoader] = field(default_factory=dict)
    test: MicrobatchLoader | None = None
    corpora: CorpusWatch = field(default_factory=CorpusWatch)
    notes: tuple[str, ...] = ()
    prompts: Prompts | None = None


def open_data(
    config: DataSettings,
    train: TrainSettings,
    vocab_size: int,
    place: Coordinates = _ALONE,
    kept: Tensor | None = None,
    depths: int = 0,
) -> Data:
    """Index the samples that the run will read, without help from other ranks.

    ``place`` gives the replica of this rank. The rank trains on the tokens at the positions
    ``kept`` of every sample, or on all tokens if it is ``None``. Every token predicts ``depths``
    further tokens.

    Raises:
        FileNotFoundError: a corpus is missing.
        ValueError: a corpus is damaged, or a split is too short for one sample.
    """
    evaluations = evaluations_of_validation(train)
    validation: int | None = evaluations * train.eval_iters * train.global_batch_size
    if config.full_validation and evaluations:
        validation = None
    datasets = build_datasets(config, (train.dataset_samples, validation, 0), vocab_size)
    if local_rank() == 0:
        datasets.corpora.compare_content()
    test, notes = _test_set(config, train, vocab_size)

    def loader(
        dataset: SampleDataset, make: type[MicrobatchLoader] = MicrobatchLoader
    ) -> MicrobatchLoader:
        return make(
            dataset,
            train.micro_batch_size,
            train.num_microbatches,
            replica=(place.data, train.replicas),
            documents=config.documents,
            kept=kept,
            depths=depths,
        )

    assert datasets.train is not None
    sets = [datasets.valid, *datasets.more_valid] if datasets.valid else []
    names = ["validation"][: len(sets)]
    if len(sets) > 1 and config.own_paths is not None:
        names = [f"validation-{name}" for name in config.own_paths.valid_names]
    validations = dict(zip(names, map(loader, sets), strict=True))
    notes += tuple(_on_validation_sets(config, validations))
    return Data(
        loader(datasets.train, PrefetchingLoader if config.prefetch else MicrobatchLoader),
        validations,
        loader(test) if test else None,
        datasets.corpora,
        notes,
    )


def _on_validation_sets(
    config: DataSettings, sets: Mapping[str, MicrobatchLoader]
) -> Iterator[str]:
    """Yield lines on the names of sets, if there are several, and on samples that are left out.

    Raises:
        ValueError: a set that is to be read whole does not fill a batch.
    """
    own = config.own_paths
    blends = () if own is None else own.valid
    for number, (name, loader) in enumerate(sets.items()):
        told = ""
        if len(sets) > 1:
            told = f"{name} is {', '.join(str(share.prefix) for share in blends[number])}"
        if config.full_validation:
            whole = _read_whole(name, loader)
            told = f"{told}; {whole}" if told else whole
        if told:
            yield told


def _read_whole(name: str, loader: MicrobatchLoader) -> str:
    """Return a line on the batches that an evaluation of a whole set reads.

    Raises:
        ValueError: the set does not fill a batch.
    """
    batches, left = loader.whole_batches, loader.samples % loader.batch_size
    if not batches:
        raise ValueError(
            f"--full-validation: {name} has {counted(loader.samples, 'sample')}, less than a batch "
            f"of {loader.batch_size}: lower --global-batch-size, or leave it out"
        )
    rest = f", without its last {counted(left, 'sample')}" if left else ""
    return f"an evaluation of {name} reads {counted(batches, 'batch')}{rest}"


def evaluations_of_validation(train: TrainSettings) -> int:
    """Return how often a whole job evaluates the validation set."""
    between = train.train_iters // train.eval_interval if train.eval_interval else 0
    return between + ("validation" in train.final_sets)


def _test_set(
    config: DataSettings, train: TrainSettings, vocab_size: int
) -> tuple[SampleDataset | None, tuple[str, ...]]:
    """Return the test set, and a line if there is none.

    The default split gives a thousandth of the documents to the test set; of a small corpus that is
    not one document. Then the test set is left out, unless it is the only set to evaluate.
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
