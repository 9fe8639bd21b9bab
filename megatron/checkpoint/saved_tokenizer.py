"""The tokenizer of a run, as its checkpoints remember it.

    ROOT/iter_0000010/common.json                     its flags, and the digests of its files
    ROOT/tokenizer_0123456789abcdef/tokenizer.model   copies of its files

All checkpoints of a run share the copies. The name of the copies' folder follows from their
digests: runs with other tokenizers have other folders. A checkpoint names neither a path nor a
file: the kind of the tokenizer decides which files there are.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from megatron.checkpoint.common import COMMON, read_common
from megatron.checkpoint.digests import FileDigest, RunningDigest, digest_of
from megatron.checkpoint.folder import DamagedError
from megatron.checkpoint.tokenizer_files import (
    GPT2,
    LARGEST,
    MODEL,
    PATHS,
    fault_of,
    names,
    sources,
)
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.flags.declare import Declaration, option_of
from megatron.flags.groups import declarations, filled
from megatron.native.files import atomic_path, read_bytes

PREFIX: Final = "tokenizer_"
"""Beginning of the names of folders with copies."""

_KEY: Final = "tokenizer"
_WAY_OUT: Final = "give --tokenizer-type and its files"
_HASH: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class SavedTokenizer:
    """A tokenizer as a checkpoint remembers it.

    Attributes:
        settings: its settings without the paths of its files.
        files: digests of its files, by the names of their copies.
    """

    settings: TokenizerSettings
    files: Mapping[str, FileDigest]

    @classmethod
    def of(cls, used: TokenizerSettings) -> "SavedTokenizer | None":
        """Return the tokenizer of a run; ``None``: the run has none, and no size of a vocabulary.

        Raises:
            OSError: a file cannot be read.
        """
        if used.tokenizer_type is None and used.vocab_size is None:
            return None
        files = {name: digest_of(path) for name, path in sources(used).items()}
        return cls(_without_paths(used), files)

    @classmethod
    def read(cls, where: Path) -> "SavedTokenizer | None":
        """Return the tokenizer that a checkpoint remembers; ``None``: it remembers no tokenizer.

        Raises:
            DamagedError: the checkpoint's values cannot be read, or this program does not know the
                tokenizer.
        """
        found = read_common(where).get(_KEY)
        if found is None:
            return None
        try:
            flags, entries = dict(found["flags"]), dict(found["files"])
            files = {name: FileDigest(**entry) for name, entry in entries.items()}
            fault = next(_faults(flags, files), None)
        except (TypeError, KeyError, ValueError) as error:
            fault = f"this version does not know it ({error})"
        if fault is not None:
            raise DamagedError(f"{where / COMMON}: tokenizer: {fault}; {_WAY_OUT}")
        words = {own.option: own.words(_value(flags[own.name])) for own in _declared(flags)}
        return cls(filled((TokenizerSettings,), words)[TokenizerSettings], files)

    @property
    def stored(self) -> dict[str, Any]:
        """The tokenizer as plain data, to stand among the values of a checkpoint."""
        values = vars(self.settings)
        asked = {f.name: values[f.name] for f in fields(self.settings)}
        unlike = {n: v for n, v in asked.items() if v != getattr(TokenizerSettings, n)}
        return {_KEY: {"flags": unlike, "files": {n: vars(d) for n, d in self.files.items()}}}

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    @property
    def is_copied(self) -> bool:
        """Whether runs copy the files beside their checkpoints."""
        return 0 < self.size <= LARGEST

    def folder(self, root: Path) -> Path:
        """Return the folder of the copies beside the checkpoints of the folder ``root``."""
        lines = (f"{name} {own.size} {own.blake3}\n" for name, own in sorted(self.files.items()))
        return root / f"{PREFIX}{blake3(''.join(lines).encode()).hexdigest()[:16]}"

    def copy(self, root: Path, used: TokenizerSettings) -> None:
        """Copy the files beside the checkpoints of a folder, unless they are there already.

        Args:
            root: folder of all checkpoints.
            used: the settings with the paths of the files.

        Raises:
            OSError: a file cannot be read or written, or has changed.
        """
        if not self.is_copied:
            return
        where = self.folder(root)
        for name, source in sources(used).items():
            if name not in self.files or not fault_of(where / name, self.files[name]):
                continue
            content, running = read_bytes(source, LARGEST), RunningDigest()
            running.update(memoryview(content))
            if running.digest != self.files[name]:
                raise OSError(f"{source} has changed since the run began")
            if where.is_symlink():
                raise OSError(f"{where} is a link")
            where.mkdir(parents=True, exist_ok=True)
            with atomic_path(where / name) as temporary:
                temporary.write_bytes(content)

    def problems(self, root: Path) -> Iterator[str]:
        """Yield a sentence for each fault of the copies; too large files have none."""
        for name, entry in self.files.items() if self.is_copied else ():
            if fault := fault_of(self.folder(root) / name, entry):
                yield fault

    def placed(self, root: Path) -> TokenizerSettings:
        """Return the settings with the paths of the copies.

        Raises:
            DamagedError: there are no copies, or one of them is not the file that the run read.
        """
        if self.size > LARGEST:
            raise DamagedError(
                f"the tokenizer's files have {self.size:,} bytes, and checkpoints keep copies of "
                f"up to {LARGEST:,}: {_WAY_OUT}"
            )
        if fault := next(self.problems(root), None):
            raise DamagedError(f"{fault}; mend it, or {_WAY_OUT}")
        kind, where = self.settings.tokenizer_type, self.folder(root)
        if not self.files:
            return self.settings
        if kind == "GPT2BPETokenizer":
            vocab, merges = (where / name for name in GPT2)
            return replace(self.settings, vocab_file=vocab, merge_file=merges)
        model = where if kind == "HuggingFaceTokenizer" else where / MODEL[0]
        return replace(self.settings, tokenizer_model=model)

    def completed(
        self, root: Path, own: TokenizerSettings, given: Collection[str]
    ) -> tuple[TokenizerSettings, list[str]]:
        """Return the settings that a command line and this tokenizer make together.

        Given flags count. If they name another kind of tokenizer, nothing is added; if they name
        another file, only the kind is.

        Args:
            root: folder of all checkpoints.
            own: the settings of the command line.
            given: names of the settings that the command line gives.

        Returns:
            The settings, and a note on each given flag that differs from this tokenizer.

        Raises:
            DamagedError: as in ``placed``.
        """
        kind = self.settings.tokenizer_type
        if "tokenizer_type" in given and own.tokenizer_type != kind:
            return own, [_note("tokenizer_type", own.tokenizer_type, kind)]
        own = replace(own, tokenizer_type=kind)
        if named := sources(own) if given else {}:
            if notes := list(self._other_files(named)):
                return own, notes
            saved = replace(self.settings, **{name: getattr(own, name) for name in PATHS})
        else:
            saved = self.placed(root)
        both = [name for name in vars(saved) if name in given and name not in PATHS]
        pairs = {name: (getattr(own, name), getattr(saved, name)) for name in both}
        notes = [_note(name, mine, there) for name, (mine, there) in pairs.items() if mine != there]
        return replace(saved, **{name: mine for name, (mine, _) in pairs.items()}), notes

    def _other_files(self, named: Mapping[str, Path]) -> Iterator[str]:
        """Yield a note on each file that is not the file of this tokenizer."""
        for name, path in named.items():
            try:
                found = digest_of(path).blake3
            except OSError:
                continue  # the tokenizer tells it
            there = self.files[name].blake3 if name in self.files else "none"
            if found != there:
                yield (
                    f"{path} counts, with the BLAKE3 digest {found}; the file {name} of the "
                    f"checkpoint's tokenizer has {there}"
                )


def tokenizer_of(
    where: Path, own: TokenizerSettings, given: Collection[str]
) -> tuple[TokenizerSettings, list[str]]:
    """Return the tokenizer that flags and a checkpoint give, with notes for the log.

    A checkpoint that remembers no tokenizer leaves the flags as they are. So does a tokenizer that
    this version does not know, if the flags name one.

    Args:
        where: folder of the checkpoint.
        own: as in ``SavedTokenizer.completed``.
        given: as in ``SavedTokenizer.completed``.

    Raises:
        DamagedError: as in ``SavedTokenizer.read`` and ``SavedTokenizer.completed``.
    """
    try:
        saved = SavedTokenizer.read(where)
    except DamagedError as error:
        if "tokenizer_type" not in given:
            raise
        return own, [f"the given tokenizer counts, and the checkpoint's does not: {error}"]
    if saved is None:
        return own, []
    found, notes = saved.completed(where.parent, own, given)
    if found != own:
        added = {o: words for o, words in flags_of(found).items() if o not in flags_of(own)}
        shown = " ".join(" ".join([option, *words]) for option, words in added.items())
        begin = "the tokenizer's other flags are those of" if given else "the tokenizer is that of"
        notes.append(f"{begin} {where}: {shown}")
    return found, notes


def flags_of(settings: TokenizerSettings) -> dict[str, list[str]]:
    """Return the flags that make settings, each with the words behind it."""
    values = vars(settings)
    return {
        own.option: own.words(values[own.name])
        for own in declarations(TokenizerSettings)
        if values[own.name] != own.default
    }


def _declared(flags: Collection[str]) -> list[Declaration]:
    return [own for own in declarations(TokenizerSettings) if own.name in flags]


def _value(stored: Any) -> Any:
    return tuple(stored) if isinstance(stored, list) else stored


def _faults(flags: Mapping[str, Any], files: Mapping[str, FileDigest]) -> Iterator[str]:
    """Yield faults of stored values that no run saves."""
    declared = _declared(flags)
    if unknown := flags.keys() - {own.name for own in declared}:
        yield f"this version does not know {', '.join(sorted(unknown))}"
    for own in declared:
        if own.name in PATHS:
            yield f"{own.name} stands there, and checkpoints name no files"
        words, allowed = own.words(_value(flags[own.name])), own.facts.range
        if fault := own.unreadable(words):
            yield fault
        elif allowed is not None and not allowed.contains(own.value(words)):
            yield f"{own.shown(flags[own.name])}: must be {allowed.words}"
    must, may = names(flags.get("tokenizer_type"))
    if not set(must) <= files.keys() <= {*must, *may}:
        wanted = " and ".join(must) or "none"
        yield f"its files are {', '.join(sorted(files)) or 'none'}, and not {wanted}"
    for name, entry in files.items():
        is_sized = type(entry.size) is int and entry.size >= 0
        if not is_sized or not _HASH.fullmatch(str(entry.blake3)):
            yield f"{name} has no size and digest"


def _without_paths(settings: TokenizerSettings) -> TokenizerSettings:
    return replace(settings, tokenizer_model=None, vocab_file=None, merge_file=None)


def _note(name: str, own: object, there: object) -> str:
    """Return the note on a given flag whose value is another one in the checkpoint."""
    says = "none" if there is None else there
    return f"{option_of(name)} {own} counts; the checkpoint's tokenizer has {says}"
