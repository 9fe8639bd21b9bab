"""Writes and reads a checkpoint: every rank its boxes, the first rank the other values.

The files of tensors have the format of ``torch.distributed.checkpoint``. Each rank forces its own
files to disk and computes their digests; the first rank collects the digests for the manifest. If a
step fails on one rank, all ranks raise the same error, and older checkpoints stay as they are.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from megatron.checkpoint import folder
from megatron.checkpoint.boxed import BoxedTensor, StreamedTensor
from megatron.checkpoint.common import COMMON, Common
from megatron.checkpoint.digests import Digest, FileDigest, threads_of_rank
from megatron.checkpoint.folder import DamagedError
from megatron.checkpoint.hashing import HashedStream, HashedWriter
from megatron.checkpoint.lock import FolderLock
from megatron.checkpoint.metadata import METADATA
from megatron.checkpoint.reading import TensorReader, read_boxes
from megatron.parallel.groups import ConnectedAxis

_TENSORS: Final = ".distcp"
"""Ending of the files of tensors."""

_COPY_AHEAD: Final = 10_000_000
"""Bytes that are copied from a GPU while other bytes are written."""

T = TypeVar("T")


class SaveError(OSError):
    """A checkpoint could not be written; the message says where and why."""


class OtherModelError(ValueError):
    """An undamaged checkpoint lacks a tensor, or has it in another shape; the message names it."""


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
        tensors: tensors of this rank, by name in the whole model. A box that several ranks pass is
            written by one of them.
        common: the values that are not tensors; the first rank writes its own.
        hosts: all ranks of the job, connected on CPUs. No other traffic may use the group.
        files: number of files of tensors that a rank writes, each on a thread of its own. Streamed
            tensors have a file each, and ``files`` of them are in memory at a time.
        lock: the lock of ``root``, if this rank holds it.

    Returns:
        The folder of the checkpoint.

    Raises:
        SaveError: raised on every rank if any rank failed; older checkpoints stay as they are.
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
        if first:  # no rank writes any more: all ranks have met before the error was raised
            folder.give_up(root, iteration)
        raise
    return where


def check_files(where: Path, hosts: ConnectedAxis) -> str | None:
    """Check a checkpoint's files before tensors are read; every rank of the job calls it.

    The sizes of all files are compared with the manifest. So are the contents of the files that
    hold no tensors, before anything is unpickled.

    Returns:
        The fault of the first damaged file, the same on every rank; ``None``: there is no fault.
    """
    try:
        manifest = folder.read_manifest(where)
        names = _own_names(manifest, hosts)
        small = [name for name in names if not name.endswith(_TENSORS)]
        problem = folder.problem_of(where, names, manifest=manifest, sizes_only=True)
        problem = problem or folder.problem_of(where, small, manifest=manifest)
        for name in {COMMON, METADATA}.difference(manifest):
            problem = (
                f"{where / folder.MANIFEST} does not list {name}, so that it cannot be checked"
            )
    except DamagedError as error:
        problem = str(error)
    return next(filter(None, hosts.all_gather_object(problem)), None)


def read(where: Path, tensors: Mapping[str, BoxedTensor], hosts: ConnectedAxis) -> None:
    """Fill tensors from a checkpoint of any grid of ranks; every rank of the job calls it.

    Values are converted to the dtypes of the tensors. ``check_files`` must have found no fault. All
    ranks together compare the files of tensors with the manifest while they read them. This order
    is safe, because reading a tensor executes no code.

    Args:
        where: folder of the checkpoint.
        tensors: tensors to fill, by name in the whole model; their content is undefined after an
            error.
        hosts: as in ``write``.

    Raises:
        DamagedError: a file differs from the file that was written; raised on all ranks.
        OtherModelError: a tensor is missing or has another shape; raised on all ranks.
    """
    manifest, threads = folder.read_manifest(where), threads_of_rank()
    names = [name for name in _own_names(manifest, hosts) if name.endswith(_TENSORS)]
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as aside:
        compare = partial(folder.problem_of, where, names, manifest=manifest, threads=threads)
        compared = aside.submit(compare)
        other, failure = _fill(where, tensors)
    found = hosts.all_gather_object((compared.result(), other, failure))
    damage, others, failures = (list(filter(None, told)) for told in zip(*found, strict=True))
    if damage or (failures and not others):
        raise DamagedError([*damage, *failures][0])
    if others:
        raise OtherModelError(others[0])


def lacks(where: Path, tensors: Mapping[str, BoxedTensor], hosts: ConnectedAxis) -> bool:
    """Return whether the checkpoint lacks a tensor of some rank, or has it in another shape.

    Every rank of the job calls this function and gets the same answer.

    Args:
        where: folder of the checkpoint, in which ``check_files`` has found no fault.
        tensors: tensors of this rank, by name in the whole model.
        hosts: as in ``write``.
    """
    own = False
    if tensors:
        known = TensorReader(where).metadata.state_dict_metadata
        own = _difference(where, known, tensors) is not None
    return any(hosts.all_gather_object(own))


def _own_names(manifest: Mapping[str, Digest], hosts: ConnectedAxis) -> list[str]:
    """Return the files of a manifest that this rank compares."""
    return sorted(manifest)[hosts.rank :: hosts.size]


def _fill(where: Path, tensors: Mapping[str, BoxedTensor]) -> tuple[str | None, str | None]:
    """Fill tensors; return how the model differs and why reading failed (``None``: no fault)."""
    try:
        reader = TensorReader(where)
        if other := _difference(where, reader.metadata.state_dict_metadata, tensors):
            return other, None
        read_boxes(tensors, reader, reader.metadata)
    except Exception as error:  # a damaged file may raise any exception
        return None, f"{where} cannot be read ({_said(error)})"
    return None, None


def _difference(
    where: Path, known: Mapping[str, STORAGE_TYPES], tensors: Mapping[str, BoxedTensor]
) -> str | None:
    """Return the fault of the first tensor that the checkpoint lacks or has in another shape."""
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
    # Copying GPU tensors ahead uses a stream of the thread's current GPU. A thread that writes
    # tensors of the host has set no GPU, and would use the first GPU of the machine.
    ahead = _COPY_AHEAD if any(tensor.is_cuda for tensor in tensors.values()) else 0
    streamed = any(isinstance(tensor, StreamedTensor) for tensor in tensors.values())
    writer = HashedWriter(partial, files, ahead, file_each=streamed)
    if hosts.size == 1:
        # PyTorch warns about a job of one rank. The filter stays, because restoring the old filters
        # would also remove the filters that other threads set meanwhile.
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
    """Do ``work`` on every rank; return the results of all ranks, or raise on all ranks.

    Raises:
        SaveError: a rank failed; the message names the rank.
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
    """Return which ranks failed and why; PyTorch has collected this on every rank."""
    return "; ".join(f"rank {rank}: {_said(cause[0])}" for rank, cause in failed.failures.items())


def _said(error: BaseException) -> str:
    """Return the message of an error, or its class if the message is empty."""
    return str(error) or type(error).__name__
