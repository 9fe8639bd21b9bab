"""The files of an unfinished run, in a folder beside its output: ``PREFIX.unfinished``.

Tokens are appended to the files, and every few seconds a state file records how many of their bytes
are valid. A run that was killed goes on from this state and cuts off the bytes behind it. At the
end the files are renamed to their places, each index after its tokens.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from megatron.data.index_file import Sequences, map_bytes, write_index
from megatron.data.indexed import bin_path, idx_path
from megatron.data.preparation.encode import TOLD, Encoded, Tokens
from megatron.native.files import read_bytes, replace_text, sync, unlinked

_STATE = "state.json"
_FILE = re.compile(
    r"state\.json|\d+\.(bin|lengths|documents|idx)|\.state\.json\.[-0-9a-f]+"
    r"|\.nfs[0-9a-f]+|\.DS_Store|\._.*"
)
"""Names of the files of a run, the last one of a state that was being written; and of files that
file systems add: NFS for a removed file that is still open, and macOS."""


@dataclass
class State:
    """How far a run has come.

    Attributes:
        settings: every setting that the files depend on, by flag.
        file: number of the input file that is being read.
        position: position in this input file, as ``Block.end``.
        line: lines of this input file that were read.
        done_bytes: bytes of the input files before this input file.
        documents: records that became documents.
        tokens: ids written for all keys.
        bad: records that could not become documents.
        told: descriptions of the first bad records.
        sizes: bytes of each file written so far.
        is_complete: whether everything is written and only the renaming is left.
    """

    settings: dict[str, str]
    file: int = 0
    position: int = 0
    line: int = 0
    done_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    bad: int = 0
    told: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    is_complete: bool = False

    def add(self, name: Path, made: Encoded) -> None:
        """Count the records of a block of the input file ``name``."""
        for line, why in made.told[: TOLD - len(self.told)]:
            self.told.append(f"{name} line {self.line + line + 1:,} {why}")
        self.line += made.lines
        self.documents += made.documents
        self.bad += made.bad

    def next_file(self, size: int) -> None:
        """Go on to the next input file; the file before it has ``size`` bytes."""
        self.file, self.position, self.line = self.file + 1, 0, 0
        self.done_bytes += size


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs; a missing folder is made.

    Raises:
        ValueError: another run has locked the folder, or it is none of a run: a link, or a folder
            with files that no run makes, which would be removed.
    """
    folder.mkdir(exist_ok=True)
    foreign = next((path.name for path in folder.iterdir() if not _FILE.fullmatch(path.name)), None)
    if folder.is_symlink() or foreign:
        why = f"holds {foreign}" if foreign else "is a link"
        raise ValueError(
            f"{folder} {why}, so it is no folder of an unfinished run, and its files would be "
            "removed: move it away, or give another --output-prefix"
        )
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ValueError(
            f"another run is writing to {folder}: wait for it, or give another --output-prefix"
        ) from error
    finally:
        os.close(handle)


def read_state(folder: Path) -> State | None:
    """Return the state that a run has left in a folder; ``None``: there is no state.

    Raises:
        ValueError: the state is damaged.
    """
    path = folder / _STATE
    if not path.exists():
        return None
    try:
        return State(**json.loads(read_bytes(path)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): start anew with --restart") from error


class Unfinished:
    """The files of a run: for each prefix ids, lengths of sequences and ends of documents.

    Args:
        folder: folder of the files.
        prefixes: output prefix of each key.
        dtype: dtype of the ids.
        state: where the run begins; the files are cut off at its sizes.

    Raises:
        ValueError: a file is shorter than the state says.
    """

    def __init__(
        self,
        folder: Path,
        prefixes: Mapping[str, Path],
        dtype: np.dtype[np.integer],
        state: State,
    ) -> None:
        self._folder, self._prefixes, self._dtype, self._state = folder, prefixes, dtype, state
        self._stack = ExitStack()
        self._files: dict[str, IO[bytes]] = {}
        self._sequences = dict.fromkeys(prefixes, 0)
        if state.is_complete:
            return
        for number, key in enumerate(prefixes):
            for kind in ("bin", "lengths", "documents"):
                self._open(f"{number}.{kind}")
            self._sequences[key] = state.sizes.get(f"{number}.lengths", 0) // 4

    def _open(self, name: str) -> None:
        opened = open(self._folder / name, "ab", buffering=1 << 20, opener=unlinked)  # noqa: SIM115
        file = self._stack.enter_context(opened)
        size = self._state.sizes.get(name, 0)
        if file.tell() < size:
            raise ValueError(
                f"{self._folder / name} has {file.tell()} bytes where the run that was ended had "
                f"written {size}: start anew with --restart"
            )
        file.truncate(size)
        self._files[name] = file

    def append(self, tokens: Mapping[str, Tokens]) -> None:
        """Append the documents of a block."""
        for number, key in enumerate(self._prefixes):
            made = tokens[key]
            ends = np.cumsum(np.frombuffer(made.counts, "<i4"), dtype="<i8") + self._sequences[key]
            self._sequences[key] += len(made.lengths) // 4
            self._files[f"{number}.bin"].write(made.ids)
            self._files[f"{number}.lengths"].write(made.lengths)
            self._files[f"{number}.documents"].write(ends.tobytes())
            self._state.tokens += len(made.ids) // self._dtype.itemsize

    def save(self) -> None:
        """Save the state with the present sizes of the files, so that a run can go on from here."""
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            self._state.sizes[name] = file.tell()
        replace_text(self._folder / _STATE, json.dumps(asdict(self._state)))

    def finish(self) -> None:
        """Write the indices and rename all files; a run that is killed meanwhile can go on."""
        if not self._state.is_complete:
            for number in range(len(self._prefixes)):
                self._index(number)
            self._state.is_complete = True
            self.save()
        self.close()
        for number, prefix in enumerate(self._prefixes.values()):
            tokens, index = self._folder / f"{number}.bin", self._folder / f"{number}.idx"
            if tokens.exists():
                idx_path(prefix).unlink(missing_ok=True)
                tokens.replace(bin_path(prefix))
            if index.exists():
                index.replace(idx_path(prefix))
        shutil.rmtree(self._folder)

    def discard(self) -> None:
        """Remove all files."""
        self.close()
        shutil.rmtree(self._folder)

    def _index(self, number: int) -> None:
        for kind in ("bin", "lengths", "documents"):
            self._files[f"{number}.{kind}"].flush()
        lengths = map_bytes(self._folder / f"{number}.lengths").view("<i4")
        ends = map_bytes(self._folder / f"{number}.documents").view("<i8")
        path = self._folder / f"{number}.idx"
        write_index(path, self._dtype, [Sequences(lengths, np.concatenate([[0], ends]))])
        sync(path)

    def close(self) -> None:
        """Close all files; the files of an unfinished run stay in the folder."""
        self._stack.close()
