"""A run that loads a checkpoint has its tokenizer, without a flag of the tokenizer.

A flag of the command line counts against the checkpoint, and a note tells where they differ.
"""

from pathlib import Path
from typing import Final

from megatron.checkpoint import folder
from megatron.checkpoint.common import COMMON
from megatron.checkpoint.folder import DamagedError
from megatron.checkpoint.saved_tokenizer import flags_of, tokenizer_of
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.flags.groups import all_declarations, filled
from megatron.flags.words import SortedWords
from megatron.run.saved_model import USE

_DECLARED: Final = all_declarations((TokenizerSettings,))
_TYPE: Final = "--tokenizer-type"


def add_saved_tokenizer(words: SortedWords) -> None:
    """Add the flags of the saved tokenizer, with a note; or a mistake, if its files are damaged.

    A checkpoint that remembers no tokenizer, or none that can be read, adds nothing.
    """
    given = words.given
    if "--load" not in given or _is_whole(words) or not words.unreadable.isdisjoint(_DECLARED):
        return
    where = _newest(Path(given["--load"][0]), given.get("--ckpt-step", [""])[0])
    if where is None:
        return
    own = {option: values for option, values in given.items() if option in _DECLARED}
    settings = filled((TokenizerSettings,), own)[TokenizerSettings]
    try:
        found, notes = tokenizer_of(where, settings, {_DECLARED[option].name for option in own})
    except DamagedError as error:
        words.mistakes.append(f"--load: {error}")
        words.unreadable.add(_TYPE)
        return
    given.update({n: values for n, values in flags_of(found).items() if n not in given})
    words.notes += [f"--load: {note}" for note in notes]


def _is_whole(words: SortedWords) -> bool:
    """Return whether a line needs no tokenizer, or is of a dry run that reads no checkpoint."""
    is_dry = "--dry-run" in words.given
    if is_dry and USE not in words.given:
        return True
    is_sized = _TYPE not in words.given and "--vocab-size" in words.given
    return is_sized and (is_dry or "--mock-data" in words.given)


def _newest(root: Path, step: str) -> Path | None:
    """Return the checkpoint that the run loads first, of those whose values are as written."""
    try:
        for iteration in [int(step)] if step.isdigit() else folder.candidates(root):
            where = folder.folder_of(root, iteration)
            if folder.problem_of(where, [COMMON]) is None:
                return where
    except OSError:
        pass  # whoever loads the checkpoint tells it
    return None
