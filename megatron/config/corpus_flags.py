"""The flags about where the samples of each split come from, and about the documents in them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron.config.declare import Range, flag

_SHARED: Final = "--data-path or --data-args-path or --mock-data"
_IN_A_FILE: Final = "--per-split-data-args-path"
OWN_PATHS: Final = (
    "--train-data-path or --valid-data-path or --test-data-path or --per-split-data-args-path or "
    "--train-weighted-split-paths or --train-weighted-split-paths-path"
)
"""The flags that give every split corpora of its own, as a condition."""

_WEIGHTED: Final = f"{_SHARED} or {OWN_PATHS.partition(' or --train-weighted')[0]}"
_OWN_SETS: Final = "--valid-weighted-split-paths or --valid-weighted-split-paths-path"
_GROUP: Final = "NAME: WEIGHT START:END PREFIX, ..."

_WORKERS: Final = Range("at least 0 and at most 1,024", lambda x: 0 <= x <= 1024)

_PREFIXES: Final = "[WEIGHT] PREFIX ..."

# The formatter is off so that the flags read as a table.
# fmt: off


@dataclass(frozen=True)
class CorpusFlags:
    """Corpora of each split, and documents in samples."""

    data_args_path: Path | None = flag(None,
        "File with the words of --data-path, for blends that are too long for a command line.",
        unset="none", excludes="--data-path or --mock-data")
    train_data_path: tuple[str, ...] = flag((),
        "As --data-path, for training alone, which reads all of every corpus; instead of --split.",
        unset="a share of --data-path", metavar=_PREFIXES, excludes=f"{_SHARED} or {_IN_A_FILE}")
    valid_data_path: tuple[str, ...] = flag((),
        "As --train-data-path, for the validation set.", unset="none beside --train-data-path",
        metavar=_PREFIXES, excludes=f"{_SHARED} or {_IN_A_FILE}")
    test_data_path: tuple[str, ...] = flag((),
        "As --train-data-path, for the test set.", unset="none beside --train-data-path",
        metavar=_PREFIXES, excludes=f"{_SHARED} or {_IN_A_FILE}")
    per_split_data_args_path: Path | None = flag(None,
        "JSON file with the words of these three, under the names train, valid and test.",
        unset="none", excludes=_SHARED)
    multiple_validation_sets: bool = flag(False,
        "Evaluate every corpus of --valid-data-path, which then has no weights, by itself, and "
        "tell a loss for each.", needs=f"--valid-data-path or {_IN_A_FILE} or {_OWN_SETS}",
        lack="has no sets to tell apart", idle_with=_OWN_SETS)
    train_weighted_split_paths: tuple[str, ...] = flag((),
        "BigScience's form of --train-data-path: one word with a name and shares of corpora, whose "
        "documents between two marks from 0 to 1 are read.", unset="none",
        metavar=_GROUP, excludes=_WEIGHTED)
    valid_weighted_split_paths: tuple[str, ...] = flag((),
        "The same for the validation; of several such words each is a set of its own.",
        unset="none", metavar=f"{_GROUP} ...", excludes=_WEIGHTED)
    test_weighted_split_paths: tuple[str, ...] = flag((),
        "The same for the test set.", unset="none", metavar=_GROUP, excludes=_WEIGHTED)
    train_weighted_split_paths_path: Path | None = flag(None,
        "File with these words, each in quotes.", unset="none",
        excludes=f"{_WEIGHTED} or --train-weighted-split-paths")
    valid_weighted_split_paths_path: Path | None = flag(None,
        "The same for the validation.", unset="none",
        excludes=f"{_WEIGHTED} or --valid-weighted-split-paths")
    test_weighted_split_paths_path: Path | None = flag(None,
        "The same for the test set.", unset="none",
        excludes=f"{_WEIGHTED} or --test-weighted-split-paths")
    full_validation: bool = flag(False,
        "Every evaluation reads the whole of the validation set, once, instead of --eval-iters.",
        excludes="--mock-data", idle_without="--eval-interval or --skip-train",
        idle_with="--eval-iters 0")
    reset_attention_mask: bool = flag(False,
        "A token sees none of another document of its sample; documents end with the tokenizer's "
        "token for it.")
    reset_position_ids: bool = flag(False,
        "Positions begin anew with every document of a sample.",
        idle_with="--position-embedding-type alibi or --position-embedding-type none")
    num_workers: int | None = flag(None,
        "With 1 or more a thread reads the next iteration's samples during this one, and copies "
        "them to the GPU; with 0 both happen when they are needed.",
        _WORKERS, unset="1 on GPUs, 0 on CPUs")
