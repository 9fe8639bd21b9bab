"""The flags that name corpora and describe their documents, and the grammar of their words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron.data.config import Blend, EvaluationSet
from megatron.flags.declare import flag
from megatron.flags.ranges import Range

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
_WORKERS: Final = Range(0, 1024)
_PREFIXES: Final = "[WEIGHT] PREFIX ..."


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class DataFlags:
    """Corpus."""

    data_path: tuple[str, ...] = flag((),
        "Prefix of a .bin and .idx file. Or several prefixes, with a weight before each.",
        unset="required, except with --dry-run or --mock-data", metavar="[WEIGHT] PREFIX ...")
    mock_data: bool = flag(False,
        "Train on made-up documents, whose tokens only count up. This needs no data and no "
        "tokenizer, only --vocab-size.", excludes="--data-path")
    split: str = flag("969,30,1", "Shares of the documents for training, validation and test.",
        idle_with=OWN_PATHS)
    data_cache_path: Path | None = flag(None, "Folder where the indices of samples are kept.",
        unset="beside the data", idle_with="--mock-data")
    eod_mask_loss: bool = flag(False,
        "Leave out the loss of a token whose input is the end of a document. Every microbatch "
        "keeps the same weight, whatever number of its tokens counts.")
    calculate_per_token_loss: bool = flag(False,
        "Divide the loss by the counted tokens of the global batch, so that every counted token "
        "has the same weight. Otherwise the loss is the mean over the microbatches, and that of a "
        "microbatch the mean over its own counted tokens.", idle_without="--eod-mask-loss")
# fmt: on


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class CorpusFlags:
    """Corpora of each split, and documents in samples."""

    data_args_path: Path | None = flag(None,
        "File with the words of --data-path, for blends that are too long for a command line.",
        unset="none", excludes="--data-path or --mock-data")
    train_data_path: tuple[str, ...] = flag((),
        "As --data-path, for training alone. All documents of every corpus are read, and --split "
        "does not count.",
        unset="a share of --data-path", metavar=_PREFIXES, excludes=f"{_SHARED} or {_IN_A_FILE}")
    valid_data_path: tuple[str, ...] = flag((),
        "As --train-data-path, for the validation set.", unset="none beside --train-data-path",
        metavar=_PREFIXES, excludes=f"{_SHARED} or {_IN_A_FILE}")
    test_data_path: tuple[str, ...] = flag((),
        "As --train-data-path, for the test set.", unset="none beside --train-data-path",
        metavar=_PREFIXES, excludes=f"{_SHARED} or {_IN_A_FILE}")
    per_split_data_args_path: Path | None = flag(None,
        "JSON file with the words of --train-data-path, --valid-data-path and --test-data-path, "
        "under the names train, valid and test.",
        unset="none", excludes=_SHARED)
    multiple_validation_sets: bool = flag(False,
        "Evaluate every corpus of --valid-data-path by itself, and print a loss for each. "
        "--valid-data-path then has no weights.",
        needs=f"--valid-data-path or {_IN_A_FILE} or {_OWN_SETS}",
        lack="has no sets to tell apart", idle_with=_OWN_SETS)
    train_weighted_split_paths: tuple[str, ...] = flag((),
        "BigScience's form of --train-data-path: one word with a name, and with a share and two "
        "marks from 0 to 1 for each corpus. Documents between the two marks are read.",
        unset="none",
        metavar=_GROUP, excludes=_WEIGHTED)
    valid_weighted_split_paths: tuple[str, ...] = flag((),
        "As --train-weighted-split-paths, for the validation set. Each of several such words is a "
        "set of its own.",
        unset="none", metavar=f"{_GROUP} ...", excludes=_WEIGHTED)
    test_weighted_split_paths: tuple[str, ...] = flag((),
        "As --train-weighted-split-paths, for the test set.",
        unset="none", metavar=_GROUP, excludes=_WEIGHTED)
    train_weighted_split_paths_path: Path | None = flag(None,
        "File with the words of --train-weighted-split-paths, each in quotes.", unset="none",
        excludes=f"{_WEIGHTED} or --train-weighted-split-paths")
    valid_weighted_split_paths_path: Path | None = flag(None,
        "File with the words of --valid-weighted-split-paths, each in quotes.", unset="none",
        excludes=f"{_WEIGHTED} or --valid-weighted-split-paths")
    test_weighted_split_paths_path: Path | None = flag(None,
        "File with the words of --test-weighted-split-paths, each in quotes.", unset="none",
        excludes=f"{_WEIGHTED} or --test-weighted-split-paths")
    full_validation: bool = flag(False,
        "Every evaluation reads the whole of the validation set, once, instead of --eval-iters.",
        excludes="--mock-data", idle_without="--eval-interval or --skip-train or --eval-iters",
        idle_with="--eval-iters 0")
    reset_attention_mask: bool = flag(False,
        "Keep the documents of a sample apart: a token sees no token of another document. A "
        "document ends with the tokenizer's token for it.")
    reset_position_ids: bool = flag(False,
        "Positions begin anew with every document of a sample.",
        idle_with="--position-embedding-type alibi or --position-embedding-type none")
    num_workers: int | None = flag(None,
        "1 or more: a thread reads the next iteration's samples during this iteration, and copies "
        "them to the GPU. 0: samples are read and copied when they are needed.",
        _WORKERS, unset="1 on GPUs, 0 on CPUs")
# fmt: on


def parse_data_path(words: Sequence[str], source: str = "--data-path") -> Blend:
    """Read the words after ``--data-path``.

    Args:
        words: one prefix, or pairs of a weight and a prefix; no words in a dry run.
        source: the flag that gives the words.

    Returns:
        ``(weight, prefix)`` pairs; a lone prefix has weight 1.

    Raises:
        ValueError: the words are not pairs, a weight is not a positive number, or the sum of the
            weights is infinite.
    """
    if len(words) == 1:
        return ((1.0, Path(words[0])),)
    if len(words) % 2:
        raise ValueError(
            f"{source} {' '.join(words)}: {len(words)} words make no WEIGHT PREFIX pairs; give "
            "one prefix, or a weight before every prefix"
        )
    blend = tuple(
        (_weight(weight, source), Path(prefix))
        for weight, prefix in zip(words[::2], words[1::2], strict=True)
    )
    if sum(weight for weight, _ in blend) == math.inf:
        raise ValueError(
            f"{source} {' '.join(words)}: the sum of the weights is infinite; give smaller ones"
        )
    return blend


def _weight(word: str, source: str) -> float:
    weight = _number(word)
    if not 0 < weight < math.inf:
        raise ValueError(
            f"{source}: {word!r} stands where a weight is expected, a number greater than 0; "
            "give WEIGHT PREFIX pairs"
        )
    return weight


def parse_split(text: str) -> tuple[float, float, float]:
    """Read ``--split``.

    Args:
        text: up to three numbers on any scale, separated by commas or slashes; missing shares
            are 0.

    Returns:
        Shares of train, valid and test.

    Raises:
        ValueError: the text has another form, or nothing is left to train on.
    """
    shares = [_number(word) for word in text.replace("/", ",").split(",")]
    if len(shares) > 3 or not min(shares) >= 0 or not 0 < shares[0] <= sum(shares) < math.inf:
        raise ValueError(
            f"--split {text}: give shares for training, validation and test, at least 0 and the "
            "first above it, for example 969,30,1"
        )
    train, valid, test = (*shares, 0.0, 0.0)[:3]
    return train, valid, test


def evaluation_sets(text: str) -> tuple[EvaluationSet, ...]:
    """Return the sets for which a ``--split`` leaves documents; all if it cannot be read."""
    try:
        _, valid, test = parse_split(text)
    except ValueError:
        return ("validation", "test")
    shares: tuple[tuple[EvaluationSet, float], ...] = (("validation", valid), ("test", test))
    return tuple(name for name, share in shares if share > 0)


def _number(word: str) -> float:
    """Return the number that a word stands for; NaN if the word is no number."""
    try:
        return float(word)
    except ValueError:
        return math.nan
