"""Writes and reads a checkpoint: every rank its boxes, the first rank what is not a tensor.

Files of tensors are those of ``torch.distributed.checkpoint``. Each rank forces its own files to
disk and knows their digests; the first rank collects them for the manifest. If a step fails on one
rank, all ranks learn it and raise the same error, and the checkpoint before stays as it is.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from megatron.checkpoint import folder
from megatron.checkpoint.boxed import BoxedTensor, StreamedTensor
from megatron.checkpoint.common import COMMON, Common
from megatron.checkpoint.digests import FileDigest, threads_of_rank
from megatron.checkpoint.folder import DamagedError
from megatron.checkpoint.hashing import HashedStream, HashedWriter
from megatron.checkpoint.lock import FolderLock
from megatron.checkpoint.metadata import METADATA
from megatron.checkpoint.reading import TensorReader, read_boxes
from megatron.parallel.groups import ConnectedAxis

_TENSORS: Final = ".distcp"
"""Ending of the files of tensors."""

_COPY_AHEAD: Final = 10_000_000
"""Bytes that are copied from a GPU while others are written."""

T = TypeVar("T")


class SaveError(OSError):
    """A checkpoint could not be written; the message says where and why."""


class OtherModelError(ValueError):
    """A sound checkpoint has no such tensor; the message names it."""


def write(
    root: Path,
    iteration: int,
    tensors: Mapping[str, BoxedTensor | StreamedTensor],
    common: Common,
    hosts: ConnectedAxis,
    files: int = 1,
    lock: FolderLock | None = None,
) -> Path:
    """Write a checkpoint; every rank of the job calls it.

    Args:
        root: folder of all checkpoints; made if it does not exist.
        iteration: finished iterations; names the checkpoint.
        tensors: what this rank writes, by name in the whole model. What several ranks have is
            written by one of them.
        common: what is not a tensor, the same on every rank.
        hosts: all ranks of the job, connected on CPUs. No other traffic may use its group.
        files: files of tensors that a rank writes, each on a thread of its own. Streamed tensors
            have a file each, and this many are in memory at a time.
        lock: of ``root``, if this rank holds it.

    Returns:
        The folder of the checkpoint.

    Raises:
        SaveError: on every rank if it failed on one; older checkpoints are as they were.
    """
    first = hosts.rank == 0
    where, partial = folder.folder_of(root, iteration), folder.partial_of(root, iteration)
    _together(hosts, where, lambda: None if lock is None else lock.keep())
    try:
        _together(hosts, where, lambda: folder.begin(root, iteration) if first else None)
        digests = _together(
            hosts, where, lambda: _write_own(partial, tensors, common, hosts, files)
        )
        every = {name: entry for own in digests for name, entry in own.items()}
        _together(hosts, where, lambda: folder.finish(root, iteration, every) if first else None)
    except SaveError:
        if first:  # no rank writes any more: all have met before the error was raised
            folder.give_up(root, iteration)
        raise
    return where


def check_files(where: Path, hosts: ConnectedAxis) -> str | None:
    """Check what can be checked before tensors are read; every rank of the job calls it.

    The sizes of all files are compared with the manifest, and the contents of those that are no
    tensors, so that what is unpickled is what was written.

    Returns:
        What is wrong with the first damaged file, the same on every rank; ``None`` if nothing is.
    """
    try:
        names = _own_names(where, hosts)
        small = [name for name in names if not name.endswith(_TENSORS)]
        problem = folder.problem_of(where, names, sizes_only=True)
        problem = problem or folder.problem_of(where, small)
        for name in {COMMON, METADATA}.difference(folder.read_manifest(where)):
            problem = (
                f"{where / folder.MANIFEST} does not list {name}, so that it cannot be checked"
            )
    except DamagedError as error:
        problem = str(error)
    return next(filter(None, hosts.all_gather_object(problem)), None)


def read(where: Path, tensors: Mapping[str, BoxedTensor], hosts: ConnectedAxis) -> None:
    """Fill tensors from a checkpoint of any layout; every rank of the job calls it.

    Values are converted to the types of the tensors. ``check_files`` must have found nothing. The
    contents of the files of tensors are compared with the manifest while they are read, by all
    ranks together: no code is executed to read a tensor.

    Args:
        where: folder of the checkpoint.
        tensors: to be filled, by name in the whole model; undefined after an error.
        hosts: as in ``write``.

    Raises:
        DamagedError: a file is not what was written; raised on all ranks.
        OtherModelError: a tensor is missing or has another shape; raised on all ranks.
    """
    names = [name for name in _own_names(where, hosts) if name.endswith(_TENSORS)]
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as aside:
        compared = aside.submit(folder.problem_of, where, names, threads=threads_of_rank())
        other, failure = _fill(where, tensors)
    found = hosts.all_gather_object((compared.result(), other, failure))
    damage, others, failures = (list(filter(None, told)) for told in zip(*found, strict=True))
    if damage or (failures and not others):
        raise DamagedError([*damage, *failures][0])
    if others:
        raise OtherModelError(others[0])


def lacks(where: Path, tensors: Mapping[str, BoxedTensor], hosts: ConnectedAxis) -> bool:
    """Return whether a rank has tensors that are not there, or not in their shape.

    Every rank of the job calls it, and gets the same answer.

    Args:
        where: folder of the checkpoint, in which ``check_files`` has found nothing.
        tensors: by name in the whole model.
        hosts: as in ``write``.
    """
    own = False
    if tensors:
        known = TensorReader(where).metadata.state_dict_metadata
        own = _difference(where, known, tensors) is not None
    return any(hosts.all_gather_object(own))


def _own_names(where: Path, hosts: ConnectedAxis) -> list[str]:
    """Return the files that this rank compares with the manifest, which is readable."""
    return sorted(folder.read_manifest(where))[hosts.rank :: hosts.size]


def _fill(where: Path, tensors: Mapping[str, BoxedTensor]) -> tuple[str | None, str | None]:
    """Fill tensors; return in what the model differs, and why they cannot be read, if so."""
    try:
        reader = TensorReader(where)
        if other := _difference(where, reader.metadata.state_dict_metadata, tensors):
            return other, None
        read_boxes(tensors, reader, reader.metadata)
    except Exception as error:  # damage shows as any of them
        return None, f"{where} cannot be read ({_said(error)})"
    return None, None


def _difference(
    where: Path, known: Mapping[str, STORAGE_TYPES], tensors: Mapping[str, BoxedTensor]
) -> str | None:
    """Return in what the first tensor differs that the checkpoint does not have."""
    for name, tensor in tensors.items():
        saved = known.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            return f"{where} has no tensor {name}"
        if saved.size != tensor.size():
            return (
                f"{where}: {name} has shape {list(saved.size)}, but this model needs "
                f"{list(tensor.size())}: give the flags of the model that was saved"
            )
    return None


def _write_own(
    partial: Path,
    tensors: Mapping[str, BoxedTensor | StreamedTensor],
    common: Common,
    hosts: ConnectedAxis,
    files: int,
) -> dict[str, FileDigest]:
    """Write the files of this rank; return their digests."""
    # Copying GPU tensors ahead takes a stream of the thread's current GPU. A thread that writes
    # copies on the host has none of its own, and would take the first GPU of the machine.
    ahead = _COPY_AHEAD if any(tensor.is_cuda for tensor in tensors.values()) else 0
    streamed = any(isinstance(tensor, StreamedTensor) for tensor in tensors.values())
    writer = HashedWriter(partial, files, ahead, file_each=streamed)
    if hosts.size == 1:
        # PyTorch warns that a job of one rank is one. The filter stays, because to take it back
        # would take back those that other threads set meanwhile.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    dcp.save(dict(tensors), storage_writer=writer, process_group=hosts.group)
    expected = len(tensors) if streamed else files
    if sum(name.endswith(_TENSORS) for name in writer.digests) != expected:
        why = f": {_said(writer.failed)}" if writer.failed else ""
        raise OSError(f"a thread could not write its file{why}")  # PyTorch goes on without it
    if hosts.rank > 0:
        return writer.digests
    return writer.digests | {COMMON: _write_common(partial / COMMON, common)}


def _write_common(path: Path, common: Common) -> FileDigest:
    with HashedStream(path.open("wb")) as stream:
        stream.write(json.dumps(common, indent=1).encode())
        stream.flush()
        os.fsync(stream.fileno())
    return stream.digest


def _together(hosts: ConnectedAxis, where: Path, work: Callable[[], T]) -> list[T]:
    """Do something on every rank; return what each of them got, or raise on all of them.

    Raises:
        SaveError: names the ranks that failed.
    """
    result, error = None, None
    try:
        result = work()
    except CheckpointException as failed:
        error = _causes(failed)
    except (OSError, RuntimeError) as failed:
        error = f"rank {hosts.rank}: {_said(failed)}"
    gathered = hosts.all_gather_object((result, error))
    failures = [said for _, said in gathered if said]
    if failures:
        raise SaveError(f"{where} was not written: {failures[0]}")
    return [result for result, _ in gathered if result is not None]


def _causes(failed: CheckpointException) -> str:
    """Return which ranks failed and why, as PyTorch has collected it on every rank."""
    return "; ".join(f"rank {rank}: {_said(cause[0])}" for rank, cause in failed.failures.items())


def _said(error: BaseException) -> str:
    """Return what an error says, or its name if it says nothing."""
    return str(error) or type(error).__name__
