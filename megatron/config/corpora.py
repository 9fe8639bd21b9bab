"""The corpora that a command line names: how they are blended, and the rules about them."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from megatron.checkpoint.settings import CheckpointSettings
from megatron.config.data import (
    CorpusFlags,
    DataFlags,
    evaluation_sets,
    parse_data_path,
    parse_split,
)
from megatron.config.dry_run import DryRunSettings
from megatron.config.parallelism import on_cuda
from megatron.config.side_files import json_of, text_of
from megatron.config.train import TrainFlags, evaluation_batches
from megatron.config.weighted_splits import gives_weighted_splits, weighted_paths
from megatron.data.config import Blend, EvaluationSet, OwnPaths, Share
from megatron.data.indexed import IndexedDataset
from megatron.flags.declare import cut, is_number
from megatron.flags.groups import Flags, declarations, faults_of
from megatron.flags.rules import notes, notes_in, refuses, refuses_in

SPLITS: Final = ("train", "valid", "test")
LONGEST_LINE: Final = 1000
"""Characters of the longest message that quotes a name from a file. Such a name may be anything."""


def names_data(flags: Flags) -> bool:
    """Whether any flag names corpora."""
    own = flags[CorpusFlags]
    return bool(flags[DataFlags].data_path or own.data_args_path) or gives_splits(own)


def gives_splits(flags: CorpusFlags) -> bool:
    """Whether every split has corpora of its own."""
    by_split = flags.train_data_path, flags.valid_data_path, flags.test_data_path
    in_a_file = flags.per_split_data_args_path is not None
    return any(by_split) or in_a_file or gives_weighted_splits(flags)


def shared_blend(flags: Flags) -> Blend:
    """Return the blend of corpora that training, validation and test share.

    The blend is empty if no flag names corpora. It is also empty in a dry run whose corpora are
    named by a file, because a dry run reads no files.

    Raises:
        ValueError: the words make no blend, or their file cannot be read.
    """
    file = flags[CorpusFlags].data_args_path
    if file is None:
        return parse_data_path(flags[DataFlags].data_path)
    if flags[DryRunSettings].dry_run:
        return ()
    words = text_of("--data-args-path", file).split()
    if not words:
        raise ValueError(f"--data-args-path {file} is empty: write [WEIGHT] PREFIX ... into it")
    return parse_data_path(words, f"--data-args-path {file}")


def own_paths(flags: Flags) -> OwnPaths | None:
    """Return the blends of splits that have corpora of their own; ``None`` if they share corpora.

    A dry run reads no files, so it has ``None`` too if a file names the corpora.

    Raises:
        ValueError: words make no blend, their file cannot be read, or there is nothing to train on.
    """
    own = flags[CorpusFlags]
    if not gives_splits(own) or (flags[DryRunSettings].dry_run and _in_a_file(own)):
        return None
    paths = weighted_paths(own) if gives_weighted_splits(own) else _plain_paths(own)
    if own.full_validation and any(len(blend) > 1 for blend in paths.valid):
        way_out = "give one prefix, or prefixes without weights and --multiple-validation-sets"
        if gives_weighted_splits(own):
            way_out = "give one corpus in each group of the validation"
        raise ValueError(
            f"--full-validation reads every corpus once, so weights mean nothing to it: {way_out}"
        )
    return paths


def _plain_paths(own: CorpusFlags) -> OwnPaths:
    """Return the corpora of --train-data-path, --valid-data-path and --test-data-path.

    Their words may stand in a file, --per-split-data-args-path.
    """
    words, sources = _words_by_split(own)
    if not words["train"]:
        raise ValueError(f"{sources['train']} is missing: give the corpora to train on")
    blends = {
        name: tuple(Share(*corpus) for corpus in parse_data_path(words[name], sources[name]))
        for name in SPLITS
        if words[name] and not (name == "valid" and own.multiple_validation_sets)
    }
    train, test = blends["train"], blends.get("test", ())
    if not own.multiple_validation_sets:
        return OwnPaths(train, (blends["valid"],) if "valid" in blends else (), test)
    sets = _separate_sets(words["valid"], sources["valid"])
    # The names of the validation sets are numbers, as in Megatron-LM.
    return OwnPaths(train, sets, test, tuple(map(str, range(len(sets)))))


def _in_a_file(own: CorpusFlags) -> bool:
    return own.per_split_data_args_path is not None or any(
        getattr(own, f"{name}_weighted_split_paths_path") for name in SPLITS
    )


def sets_to_evaluate(flags: Flags) -> tuple[EvaluationSet, ...]:
    """Return the evaluation sets that have documents; all of them if the flags have a fault."""
    if not gives_splits(flags[CorpusFlags]):
        return evaluation_sets(flags[DataFlags].split)
    try:
        paths = own_paths(flags)
    except ValueError:
        paths = None
    if paths is None:
        return ("validation", "test")
    found: list[EvaluationSet] = ["validation"] if paths.valid else []
    if paths.test:
        found.append("test")
    return tuple(found)


def prefixes(flags: Flags) -> Iterator[tuple[str, Path]]:
    """Yield the flag and the prefix of every corpus, each once.

    Raises:
        ValueError: as ``shared_blend`` and ``own_paths``.
    """
    paths = own_paths(flags)
    if paths is None:
        file = flags[CorpusFlags].data_args_path
        flag = "--data-path" if file is None else f"--data-args-path {file}:"
        named = [(flag, prefix) for _, prefix in shared_blend(flags)]
    else:
        of_valid = tuple(share for blend in paths.valid for share in blend)
        blends = zip(SPLITS, (paths.train, of_valid, paths.test), strict=True)
        kind = "weighted-split-paths" if gives_weighted_splits(flags[CorpusFlags]) else "data-path"
        named = [(f"--{name}-{kind}", share.prefix) for name, blend in blends for share in blend]
    yield from dict.fromkeys(named)


def flags_of_corpora(flags: Flags) -> tuple[tuple[str, Path], ...]:
    """Return the flag and the prefix of every corpus, the same on all ranks.

    A flag stands here without the file that has its words, because the file's name may differ from
    machine to machine.

    Raises:
        ValueError: as ``prefixes``.
    """
    return tuple(
        (f"{flag.split()[0]}:" if " " in flag else flag, prefix) for flag, prefix in prefixes(flags)
    )


def _separate_sets(words: Sequence[str], source: str) -> tuple[tuple[Share, ...], ...]:
    """Return for each prefix a blend of its corpus alone."""
    for word in words:
        if is_number(word) and not os.path.exists(f"{word}.idx"):
            raise ValueError(
                f"{source}: {word!r} looks like a weight, and --multiple-validation-sets evaluates "
                "every corpus by itself: give prefixes only"
            )
    return tuple((Share(1.0, Path(word)),) for word in words)


def _words_by_split(own: CorpusFlags) -> tuple[dict[str, Sequence[str]], dict[str, str]]:
    """Return the words of every split, and the flag or file that each split's words come from."""
    file = own.per_split_data_args_path
    if file is None:
        words = own.train_data_path, own.valid_data_path, own.test_data_path
        sources = {name: f"--{name}-data-path" for name in SPLITS}
        return dict(zip(SPLITS, words, strict=True)), sources
    flag = f"--per-split-data-args-path {file}"
    form = 'write {"train": ["PREFIX"], "valid": ["PREFIX"], "test": ["PREFIX"]} into it'
    content = json_of("--per-split-data-args-path", file, form)
    if not isinstance(content, dict) or content.keys() - set(SPLITS):
        raise ValueError(f"{flag} holds something else than the three splits: {form}")
    found: dict[str, Sequence[str]] = {}
    for name in SPLITS:
        value = content.get(name) or []
        if not isinstance(value, (str, list)) or any(
            isinstance(word, (list, dict, bool)) or word is None for word in value
        ):
            raise ValueError(f"{flag}: {name} is neither a text nor a list of words: {form}")
        found[name] = value.split() if isinstance(value, str) else [str(word) for word in value]
    return found, {name: f"{flag}, {name}" for name in SPLITS}


def reads_ahead(flags: Flags) -> bool:
    """Return whether a thread reads the next batch: by default on GPUs, where the host is idle."""
    workers = flags[CorpusFlags].num_workers
    return on_cuda(flags) if workers is None else workers > 0


@refuses
def _data(flags: Flags) -> Iterator[str]:
    if not names_data(flags):
        if not flags[DryRunSettings].dry_run and not flags[DataFlags].mock_data:
            yield (
                "--data-path is missing: give the prefix of a .bin and .idx file, which "
                "tools/sample_data.py makes in seconds and prints, or --mock-data"
            )
    elif gives_splits(flags[CorpusFlags]):
        yield from faults_of(lambda: own_paths(flags))
    else:
        yield from faults_of(lambda: shared_blend(flags))


@refuses
def _split(flags: Flags) -> Iterator[str]:
    yield from faults_of(lambda: parse_split(flags[DataFlags].split))


@refuses
def _several_corpora_at_once(flags: Flags) -> Iterator[str]:
    """Refuse ``--full-validation`` of several corpora that the splits share."""
    if not flags[CorpusFlags].full_validation or gives_splits(flags[CorpusFlags]):
        return
    try:
        blend = shared_blend(flags)
    except ValueError:
        return  # another rule reports this mistake
    if len(blend) > 1:
        yield (
            "--full-validation reads every corpus once, so the weights of --data-path mean nothing "
            "to it: give the validation sets with --valid-data-path"
        )


@refuses
def _nothing_to_evaluate(flags: Flags) -> Iterator[str]:
    if not flags[TrainFlags].skip_train:
        return
    if not evaluation_batches(flags[TrainFlags]):
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


@notes
def _split_of_mock_data(flags: Flags) -> Iterator[str]:
    if flags[DataFlags].mock_data and flags[DataFlags].split != DataFlags.split:
        yield (
            f"--split {flags[DataFlags].split} divides nothing: --mock-data has samples of its own "
            "for every split with a share"
        )


@notes
def _idle_evaluation(flags: Flags) -> Iterator[str]:
    own = flags[TrainFlags]
    if own.skip_train or not evaluation_batches(own) or sets_to_evaluate(flags):
        return
    given = (
        f"--eval-iters {own.eval_iters}"
        if own.eval_interval is None
        else f"--eval-interval {own.eval_interval}"
    )
    if gives_splits(flags[CorpusFlags]):
        yield (
            f"{given} changes nothing: there is nothing to validate on; give --valid-data-path too"
        )
        return
    yield (
        f"{given} changes nothing: --split {flags[DataFlags].split} leaves no "
        "documents to validate on; for an evaluation give a second share, as in 969,30,1"
    )


@refuses_in("real")
def _data_files(flags: Flags) -> Iterator[str]:
    """Open every file, so that a broken file is found before any process group exists."""
    try:
        named = list(prefixes(flags))
    except ValueError:
        return  # the rules about the flags report this mistake
    for flag, prefix in named:
        for fault in faults_of(partial(IndexedDataset, prefix)):
            yield cut(f"{flag} {prefix}: {fault.removeprefix('--data-path: ')}", LONGEST_LINE)


@notes_in("dry")
def _files_of_a_dry_run(flags: Flags) -> Iterator[str]:
    """Note all files that only training opens: a dry run does not know whether they exist."""
    groups: list[type] = [DataFlags, CorpusFlags]
    named = [
        declared.shown(value)
        for group in groups
        for declared in declarations(group)
        if declared.name in _DATA_FILES and (value := getattr(flags[group], declared.name))
    ]
    saved, deepspeed = flags[CheckpointSettings], flags[TrainFlags].deepspeed_config
    if saved.load is not None and not saved.use_checkpoint_args:
        named.append(f"--load {saved.load}")
    if deepspeed is not None:
        named.append(f"--deepspeed-config {deepspeed}")
    if named:
        yield cut(
            f"{', '.join(named)}: not read in a dry run; training opens it, or tells why it cannot",
            LONGEST_LINE,
        )


_DATA_FILES: Final = (
    *("data_path", "data_args_path", "per_split_data_args_path"),
    *(f"{split}_data_path" for split in SPLITS),
    *(f"{split}_weighted_split_paths" for split in SPLITS),
    *(f"{split}_weighted_split_paths_path" for split in SPLITS),
)
