"""The corpora that a command line names, and how they are blended."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.data.settings import SPLITS, CorpusSettings
from megatron.data.shares import Blend, OwnPaths, Share
from megatron.data.weighted_splits import weighted_paths
from megatron.flags.declare import is_number
from megatron.native.side_files import json_of, text_of


@dataclass(frozen=True)
class NamedCorpora:
    """The corpora that settings name.

    Attributes:
        settings: the words and files that name the corpora.
        reads_files: whether files are read that have such words. A dry run reads none, and then a
            file names no corpus.
    """

    settings: CorpusSettings
    reads_files: bool

    def blend(self) -> Blend:
        """Return the blend of corpora that training, validation and test share; it may be empty.

        Raises:
            ValueError: the words make no blend, or their file cannot be read.
        """
        file = self.settings.data_args_path
        if file is None:
            return parse_data_path(self.settings.data_path)
        if not self.reads_files:
            return ()
        words = text_of("--data-args-path", file).split()
        if not words:
            raise ValueError(f"--data-args-path {file} is empty: write [WEIGHT] PREFIX ... into it")
        return parse_data_path(words, f"--data-args-path {file}")

    def own_paths(self) -> OwnPaths | None:
        """Return the blends of splits that have corpora of their own, else ``None``.

        Raises:
            ValueError: words make no blend, their file cannot be read, or there is nothing to train
                on.
        """
        own = self.settings
        if not own.gives_splits or (not self.reads_files and _in_a_file(own)):
            return None
        return weighted_paths(own) if own.gives_weighted_splits else _plain_paths(own)

    def prefixes(self) -> Iterator[tuple[str, Path]]:
        """Yield the flag and the prefix of every corpus, each once.

        Raises:
            ValueError: as ``blend`` and ``own_paths``.
        """
        paths = self.own_paths()
        if paths is None:
            file = self.settings.data_args_path
            flag = "--data-path" if file is None else f"--data-args-path {file}:"
            named = [(flag, prefix) for _, prefix in self.blend()]
        else:
            of_valid = tuple(share for blend in paths.valid for share in blend)
            blends = zip(SPLITS, (paths.train, of_valid, paths.test), strict=True)
            kind = "weighted-split-paths" if self.settings.gives_weighted_splits else "data-path"
            named = [
                (f"--{name}-{kind}", share.prefix) for name, blend in blends for share in blend
            ]
        yield from dict.fromkeys(named)

    def by_flag(self) -> tuple[tuple[str, Path], ...]:
        """Return the flag and the prefix of every corpus, the same on all ranks.

        A flag stands here without the file that has its words, because the file's name may differ
        from machine to machine.

        Raises:
            ValueError: as ``prefixes``.
        """
        return tuple(
            (f"{flag.split()[0]}:" if " " in flag else flag, prefix)
            for flag, prefix in self.prefixes()
        )


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


def _number(word: str) -> float:
    """Return the number that a word stands for; NaN if the word is no number."""
    try:
        return float(word)
    except ValueError:
        return math.nan


def _plain_paths(own: CorpusSettings) -> OwnPaths:
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


def _in_a_file(own: CorpusSettings) -> bool:
    return own.per_split_data_args_path is not None or any(
        getattr(own, f"{name}_weighted_split_paths_path") for name in SPLITS
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


def _words_by_split(own: CorpusSettings) -> tuple[dict[str, Sequence[str]], dict[str, str]]:
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
