"""The grammar of BigScience's ``--train-weighted-split-paths``, for validation and test too.

A group is ``NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX, ...``. START and END are marks
from 0 to 1; the documents of the corpus between them are read. Every group for the validation is a
validation set of its own.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from megatron.data.settings import CorpusSettings
from megatron.data.shares import OwnPaths, Share
from megatron.flags.declare import cut
from megatron.native.side_files import text_of

_FORM: Final = "give 'NAME: WEIGHT START:END PREFIX, ...', as in 'train: 1 0:0.95 corpus'"
Group = tuple[str, tuple[Share, ...]]


def weighted_paths(own: CorpusSettings) -> OwnPaths:
    """Return the corpora that the flags on weighted splits give.

    Raises:
        ValueError: a group has another form, two validation sets have one name, a file cannot be
            read, or there is nothing to train on.
    """
    train = _groups(own, "train", single=True)
    if not train:
        raise ValueError(f"--train-weighted-split-paths is missing: {_FORM}")
    valid = _groups(own, "valid", single=False)
    test = _groups(own, "test", single=True)
    names = tuple(name for name, _ in valid) if len(valid) > 1 else ()
    if len(set(names)) < len(names):
        raise ValueError(
            f"--valid-weighted-split-paths: two groups have one name, of {', '.join(names)}: "
            "name every set differently"
        )
    blends = [blend for _, blend in valid]
    return OwnPaths(train[0][1], tuple(blends), test[0][1] if test else (), names)


def _groups(own: CorpusSettings, split: str, *, single: bool) -> list[Group]:
    """Return the groups of a split, with their names."""
    flag = f"--{split}-weighted-split-paths"
    texts: Sequence[str] = getattr(own, f"{split}_weighted_split_paths")
    file: Path | None = getattr(own, f"{split}_weighted_split_paths_path")
    if file is not None:
        text = text_of(f"{flag}-path", file)
        flag = f"{flag}-path {file}"
        try:
            texts = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"{flag}: {error}; {_FORM}, in quotes") from error
    if single and len(texts) > 1:
        raise ValueError(f"{flag} has {len(texts)} groups, and one is read: {_FORM}, in quotes")
    return [_group(text, flag) for text in texts]


def _group(text: str, flag: str) -> Group:
    name, colon, rest = text.partition(":")
    if not colon or not name.strip():
        raise ValueError(f"{flag}: {cut(text, 80)!r} has no name: {_FORM}")
    return name.strip(), tuple(_share(part, flag) for part in rest.split(","))


def _share(text: str, flag: str) -> Share:
    given = f"{flag}: {cut(text.strip(), 80)!r}"
    try:
        weight, marks, prefix = text.split()
        begin, end = map(float, marks.split(":"))
        share = Share(float(weight), Path(prefix), begin, end)
    except ValueError as error:
        raise ValueError(f"{given} is no share of a corpus: {_FORM}") from error
    if not (0 <= begin < end <= 1 and 0 < share.weight < float("inf")):
        raise ValueError(
            f"{given}: the weight must be greater than 0, and the marks rise within 0 and 1; "
            f"{_FORM}"
        )
    return share
