"""Checkpoints on disk: each is complete or not there, whenever the job is killed.

    ROOT/latest_checkpointed_iteration.txt   the iteration of the last checkpoint, as in Megatron
    ROOT/iter_0000010/manifest.json          size and digest of every other file of the folder
    ROOT/iter_0000010/...

A checkpoint is written to a folder with the ending ``.partial``. Once all its files are on disk,
the folder gets the manifest, then its final name, and then the pointer names it. An older
checkpoint of the same iteration moves aside first, and comes back if the new checkpoint never gets
its name. Only the first rank of the job calls the functions that change folders.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from megatron.checkpoint.digests import PART, Digest, FileDigest, OlderDigest
from megatron.native.files import atomic_path, read_bytes
from megatron.native.slow_work import told

POINTER: Final = "latest_checkpointed_iteration.txt"
MANIFEST: Final = "manifest.json"
LARGEST_MANIFEST: Final = 1 << 28
"""Bytes of the largest manifest that is read: it has room for two million files."""

FORMAT: Final = 3
"""Format of the manifest and of the files that it lists."""

_READ: Final[Mapping[int, type[Digest]]] = {1: OlderDigest, 2: OlderDigest, FORMAT: FileDigest}
"""The kind of digest in a manifest, by format; other formats are not read."""

_PARTIAL, _REPLACED, _DELETED = ".partial", ".replaced", ".deleted"
_FOLDER: Final = re.compile(r"iter_(\d{7,})")
_FILE: Final = re.compile(r"(?!\.{1,2}$)[\w.-]+", re.ASCII)
_ITERATION: Final = re.compile(r"[0-9]{1,18}")
_LARGEST_POINTER: Final = 1 << 12


class DamagedError(ValueError):
    """A checkpoint that cannot be read; the message names the file and its fault."""


def folder_of(root: Path, iteration: int) -> Path:
    """Return the folder of the checkpoint that was written after ``iteration`` iterations."""
    return root / f"iter_{iteration:07d}"


def partial_of(root: Path, iteration: int) -> Path:
    """Return the folder of a checkpoint while it is being written."""
    return _aside(root, iteration, _PARTIAL)


def begin(root: Path, iteration: int) -> Path:
    """Make and return an empty folder to write a checkpoint to."""
    partial = partial_of(root, iteration)
    _remove(partial)
    partial.mkdir(parents=True)
    return partial


def finish(root: Path, iteration: int, files: Mapping[str, FileDigest]) -> Path:
    """Give a checkpoint its final name, and let the pointer name it.

    Args:
        root: folder of all checkpoints.
        iteration: as in ``begin``.
        files: every file of the folder; all are forced to disk (``fsync``) already.

    Returns:
        The folder of the checkpoint.
    """
    partial, final = partial_of(root, iteration), folder_of(root, iteration)
    listed = {name: vars(files[name]) for name in sorted(files)}
    text = json.dumps({"format": FORMAT, "iteration": iteration, "files": listed}, indent=1)
    with atomic_path(partial / MANIFEST) as temporary:
        temporary.write_text(text)
    _sync_folder(partial)
    replaced = _aside(root, iteration, _REPLACED)
    _rename(partial, final, replaced)
    _sync_folder(root)
    with atomic_path(root / POINTER) as temporary:
        temporary.write_text(f"{iteration}\n")
    _sync_folder(root)
    shutil.rmtree(replaced, ignore_errors=True)  # remains of it do no harm
    return final


def clean_up(root: Path) -> list[str]:
    """Remove or bring back the folders that a killed job has left behind.

    Returns:
        A line for the log about every folder that was changed, or could not be changed.
    """
    done = []
    for ending in (_REPLACED, _PARTIAL, _DELETED):
        for path in sorted(root.glob(f"iter_*{ending}")):
            final = path.with_name(path.name.removesuffix(ending))
            try:
                done.append(_tidied(path, back_to=final if ending == _REPLACED else None))
            except OSError as error:
                done.append(f"{path} stays as it is ({error})")
    return list(filter(None, done))


def _tidied(path: Path, back_to: Path | None) -> str | None:
    """Remove one folder or bring it back; return a line for the log, if it is worth telling."""
    if back_to is None:
        _remove(path)
        return f"{path}: removed, as it was never finished"
    if back_to.exists():
        _remove(path)
        return None
    path.rename(back_to)
    return f"{back_to}: brought back, because its successor was never finished"


def complete(root: Path) -> list[int]:
    """Return the iterations of the checkpoints that are complete, in ascending order."""
    found = []
    for path in root.glob("iter_*"):
        named = _FOLDER.fullmatch(path.name)
        if named and (path / MANIFEST).is_file():
            found.append(int(named[1]))
    return sorted(found)


def pointed_to(root: Path) -> int | None:
    """Return the iteration that the pointer names, or ``None`` if there is no readable pointer."""
    path = root / POINTER
    try:
        text = read_bytes(path, _LARGEST_POINTER).decode(errors="replace")
    except OSError:
        return None
    return int(text) if _ITERATION.fullmatch(text.strip()) else None


def candidates(root: Path) -> list[int]:
    """Return the checkpoints in the order in which a job should try to load them.

    The checkpoint that the pointer names comes first, then older checkpoints, the newest first.
    Newer checkpoints come last: their run was given up, or its pointer is lost. The first one may
    be incomplete, and ``problem_of`` then says why; all others are complete.
    """
    found, pointer = complete(root)[::-1], pointed_to(root)
    if pointer is None:
        return found
    older = [iteration for iteration in found if iteration < pointer]
    return [pointer, *older, *(iteration for iteration in found if iteration > pointer)]


def read_manifest(folder: Path) -> dict[str, Digest]:
    """Return the digests of a checkpoint's files.

    Raises:
        DamagedError: the manifest is missing or cannot be understood.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(read_bytes(path, LARGEST_MANIFEST, is_told=True))
        form, iteration, files = content["format"], content["iteration"], content["files"].items()
    except FileNotFoundError:
        raise DamagedError(
            f"{folder} has no {MANIFEST}: its save was never finished, or it is not of this program"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read ({error})") from error
    if type(form) is not int or form not in _READ:
        raise DamagedError(
            f"{path} says format {form!r}, and this program reads 1 to {FORMAT}: load it with the "
            "program that saved it"
        )
    if type(iteration) is not int or folder_of(folder.parent, iteration).name != folder.name:
        raise DamagedError(f"{path} is of iteration {iteration!r}, and its folder of another one")
    entries = told(files, len(files), f"entries of {path}")
    return _digests(path, entries, _READ[form])


def _digests(path: Path, files: Iterable[tuple[str, Any]], kind: type[Digest]) -> dict[str, Digest]:
    """Return the digests that a manifest lists, by file.

    Raises:
        DamagedError: an entry cannot be understood.
    """
    try:
        found = {name: kind(**entry) for name, entry in files}
    except TypeError as error:
        raise DamagedError(f"{path} cannot be read ({error})") from error
    for name, entry in found.items():
        if not _FILE.fullmatch(name):
            raise DamagedError(f"{path} lists {name!r}, which is no file of this folder")
        if isinstance(entry, OlderDigest) and entry.part not in (0, PART):
            raise DamagedError(
                f"{path} says that {name} has a digest for every {entry.part!r} bytes, and older "
                f"programs formed them for {PART}"
            )
    return found


def problems(
    folder: Path,
    names: Iterable[str] | None = None,
    *,
    manifest: Mapping[str, Digest] | None = None,
    sizes_only: bool = False,
    threads: int = 1,
) -> Iterator[str]:
    """Yield a sentence for each fault in the files of a checkpoint.

    Args:
        folder: folder of the checkpoint.
        names: the files to compare with the manifest; ``None``: all files.
        manifest: the result of ``read_manifest``, if the caller has it: a large one takes seconds.
        sizes_only: compare sizes without reading the files.
        threads: number of threads that hash.

    Raises:
        DamagedError: the manifest is missing or cannot be understood.
    """
    expected = read_manifest(folder) if manifest is None else manifest
    for name in expected if names is None else names:
        if name not in expected:
            yield f"{folder / MANIFEST} does not list {name}, so that it cannot be checked"
            continue
        path, entry = folder / name, expected[name]
        try:
            size = path.stat().st_size
            if size != entry.size:
                yield f"{path} has {size} bytes, but {entry.size} were written"
            elif not sizes_only and not entry.fits(path, threads):
                yield f"{path} is not what was written: its digest differs"
        except FileNotFoundError:
            yield f"{path} is missing"
        except OSError as error:
            yield f"{path} cannot be read ({error})"


def problem_of(
    folder: Path,
    names: Iterable[str] | None = None,
    *,
    manifest: Mapping[str, Digest] | None = None,
    sizes_only: bool = False,
    threads: int = 1,
) -> str | None:
    """Return the first fault of a checkpoint; ``None``: there is no fault.

    The arguments are as in ``problems``.
    """
    try:
        found = problems(folder, names, manifest=manifest, sizes_only=sizes_only, threads=threads)
        return next(found, None)
    except DamagedError as error:
        return str(error)


def give_up(root: Path, iteration: int) -> None:
    """Remove the folder that ``begin`` made, after the checkpoint could not be finished."""
    shutil.rmtree(partial_of(root, iteration), ignore_errors=True)


def remove(root: Path, iteration: int) -> None:
    """Delete a checkpoint; a kill leaves it whole or gone, never half."""
    deleted = _aside(root, iteration, _DELETED)
    _remove(deleted)
    folder_of(root, iteration).rename(deleted)
    _remove(deleted)


def _aside(root: Path, iteration: int, ending: str) -> Path:
    folder = folder_of(root, iteration)
    return folder.with_name(folder.name + ending)


def _rename(partial: Path, final: Path, replaced: Path) -> None:
    """Give a checkpoint its final name; on failure the older checkpoint gets the name back."""
    if not final.exists():
        partial.rename(final)
        return
    _remove(replaced)
    final.rename(replaced)
    try:
        partial.rename(final)
    except OSError:
        replaced.rename(final)
        raise


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sync_folder(folder: Path) -> None:
    """Force the file names of a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
