"""The rules about corpora: which there must be, and which flags change nothing beside them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from megatron.config.corpora import (
    gives_splits,
    names_data,
    own_paths,
    sets_to_evaluate,
    shared_blend,
)
from megatron.config.corpus_flags import CorpusFlags
from megatron.config.data_flags import parse_split
from megatron.config.declare import Flags
from megatron.config.flags import DataFlags, LogFlags, TrainFlags


def _data(flags: Flags) -> Iterator[str]:
    if not names_data(flags):
        if not flags[LogFlags].dry_run and not flags[DataFlags].mock_data:
            yield (
                "--data-path is missing: give the prefix of a .bin and .idx file, which "
                "tools/sample_data.py makes in seconds and prints, or --mock-data"
            )
        return
    named: list[Callable[[], object]] = [partial(own_paths, flags)]
    if not gives_splits(flags[CorpusFlags]):
        named = [partial(shared_blend, flags)]
    for read in named:
        try:
            read()
        except ValueError as error:
            yield str(error)


def _split(flags: Flags) -> Iterator[str]:
    try:
        parse_split(flags[DataFlags].split)
    except ValueError as error:
        yield str(error)


def _several_corpora_at_once(flags: Flags) -> Iterator[str]:
    """``--full-validation`` of a blend that the splits share."""
    if not flags[CorpusFlags].full_validation or gives_splits(flags[CorpusFlags]):
        return
    try:
        blend = shared_blend(flags)
    except ValueError:
        return  # another rule tells it
    if len(blend) > 1:
        yield (
            "--full-validation reads every corpus once, so the weights of --data-path mean nothing "
            "to it: give the validation sets with --valid-data-path"
        )


def _nothing_to_evaluate(flags: Flags) -> Iterator[str]:
    if not flags[TrainFlags].skip_train:
        return
    if not flags[TrainFlags].eval_iters:
        yield "--skip-train evaluates nothing with --eval-iters 0: give a number of batches"
    if not sets_to_evaluate(flags):
        yield f"--skip-train evaluates nothing: {_why_nothing(flags)}"


def _why_nothing(flags: Flags) -> str:
    if gives_splits(flags[CorpusFlags]):
        return "give the documents for it with --valid-data-path or --test-data-path"
    return (
        f"--split {flags[DataFlags].split} leaves no documents for it; give a second or third "
        "share, as in 969,30,1"
    )


CORPUS_RULES: Final = (_data, _split, _several_corpora_at_once, _nothing_to_evaluate)
"""The mistakes."""


def _split_of_mock_data(flags: Flags) -> Iterator[str]:
    if flags[DataFlags].mock_data and flags[DataFlags].split != DataFlags.split:
        yield (
            f"--split {flags[DataFlags].split} divides nothing: --mock-data has samples of its own "
            "for every split with a share"
        )


def _idle_evaluation(flags: Flags) -> Iterator[str]:
    interval = flags[TrainFlags].eval_interval
    if interval is None or not flags[TrainFlags].eval_iters or sets_to_evaluate(flags):
        return
    if gives_splits(flags[CorpusFlags]):
        yield (
            f"--eval-interval {interval} changes nothing: there is nothing to validate on; give "
            "--valid-data-path too"
        )
        return
    yield (
        f"--eval-interval {interval} changes nothing: --split {flags[DataFlags].split} leaves no "
        "documents to validate on; for an evaluation give a second share, as in 969,30,1"
    )


CORPUS_NOTES: Final = (_split_of_mock_data, _idle_evaluation)
"""The flags that change nothing."""
