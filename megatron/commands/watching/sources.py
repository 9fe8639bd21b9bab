"""From the words RUN of the command to files of records."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from megatron.commands.watching.records_file import RecordsFile

SUFFIX: Final = ".jsonl"
MOST_FILES: Final = 64
"""Files of records that one page shows."""

_FIRST: Final = 1 << 16  # bytes of a first line that tell whether it is a record


def records_files(words: Sequence[Path], *, may_come: bool) -> list[RecordsFile]:
    """Return the files of records that some words name.

    Args:
        words: files of ``--log-jsonl``, and folders that hold such files.
        may_come: whether a file may be missing still, because a run is about to write it.

    Raises:
        ValueError: there is nothing to read; a line for each mistake names RUN and the way out.
    """
    faults, paths = list[str](), list[Path]()
    for word in words:
        try:
            paths += _files_of(word, may_come)
        except ValueError as error:
            faults.append(f"{word}: {error}")
    paths = list(dict.fromkeys(paths))
    if len(paths) > MOST_FILES:
        faults.append(f"{len(paths)} files: one page shows {MOST_FILES} at most: name fewer")
    if faults:
        raise ValueError("\n".join(faults))
    return [RecordsFile(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _files_of(word: Path, may_come: bool) -> list[Path]:
    if word.is_dir():
        found = sorted(path for path in word.iterdir() if _holds_records(path))
        if not found:
            raise ValueError(
                f"the folder holds no records: no *{SUFFIX} in it begins with the start of a run. "
                f"Train with --log-jsonl {word / f'run{SUFFIX}'}, or name the file that "
                "--log-jsonl has written elsewhere"
            )
        return found
    if word.is_file():
        if word.stat().st_size and not _begins_with_record(word):
            raise ValueError(
                "the file holds something else than the records of a run: name the file of "
                "--log-jsonl"
            )
        return [word]
    if word.exists():
        raise ValueError("it is neither a file nor a folder: name the file of --log-jsonl")
    if may_come and word.parent.is_dir() and word.suffix:
        return [word]
    raise ValueError("there is no such file or folder: name the file of --log-jsonl, or its folder")


def _holds_records(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file() and _begins_with_record(path)


def _begins_with_record(path: Path) -> bool:
    """Whether the first line of a file looks like a record; it may be damaged or cut off."""
    with path.open("rb") as file:
        first = file.readline(_FIRST)
    if not first.lstrip().startswith(b'{"event"'):
        return _is_event(first)
    return True


def _is_event(line: bytes) -> bool:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "event" in found


def _names(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the shortest ends of paths that tell them apart, at least the names of the files."""
    for path in paths:
        parts = path.absolute().parts
        for length in range(1, len(parts) + 1):
            end = parts[-length:]
            if sum(other.absolute().parts[-length:] == end for other in paths) == 1:
                break
        yield "/".join(end)
