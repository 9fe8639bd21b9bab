"""Writes and reads a checkpoint: every rank its boxes, the first rank what is not a tensor.

Files of tensors are those of ``torch.distributed.checkpoint``. Each rank forces its own files to
disk and computes their digests; the first rank collects them for the manifest. If a step fails on
one rank, all ranks learn it and raise the same error, and the checkpoint before stays as it is.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.checkpoint import folder
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.folder import DamagedError, FileDigest
from megatron.checkpoint.metadata import METADATA, CheckedReader, read_metadata
from megatron.parallel.groups import ConnectedAxis

COMMON: Final = "common.json"
"""File of everything that is not a tensor."""

_COPY_AHEAD: Final = 10_000_000
"""Bytes that are copied from a GPU while others are written."""

Common = Mapping[str, Any]
"""Values that JSON knows, by name."""

T = TypeVar("T")


class SaveError(OSError):
    """A checkpoint could not be written; the message says where and why."""


def write(
    root: Path,
    iteration: int,
    tensors: Mapping[str, BoxedTensor],
    common: Common,
    hosts: ConnectedAxis,
    files: int = 1,
) -> Path:
    """Write a checkpoint; every rank of the job calls it.

    Args:
        root: folder of all checkpoints; made if it does not exist.
        iteration: finished iterations; names the checkpoint.
        tensors: what this rank holds, by name in the whole model.
        common: what is not a tensor, the same on every rank.
        hosts: all ranks of the job, connected on CPUs. No other traffic may use its group.
        files: files of tensors that a rank writes, each on a thread of its own.

    Returns:
        The folder of the checkpoint.

    Raises:
        SaveError: on every rank if it failed on one; older checkpoints are as they were.
    """
    first = hosts.rank == 0
    where, partial = folder.folder_of(root, iteration), folder.partial_of(root, iteration)
    try:
        _together(hosts, where, lambda: folder.begin(root, iteration) if first else None)
        _together(hosts, where, lambda: _write_tensors(partial, tensors, hosts, files))
        digests = _together(hosts, where, lambda: _digest_own(partial, common, hosts))
        every = {name: entry for own in digests for name, entry in own.items()}
        _together(hosts, where, lambda: folder.finish(root, iteration, every) if first else None)
    except SaveError:
        if first:  # no rank writes any more: all have met before the error was raised
            folder.give_up(root, iteration)
        raise
    return where


def read(where: Path, tensors: Mapping[str, BoxedTensor], hosts: ConnectedAxis) -> None:
    """Fill tensors from a checkpoint of any layout; every rank of the job calls it.

    Values are converted to the types of the tensors. The files must have been checked
    (``check_files``): only then may they be unpickled.

    Args:
        where: folder of the checkpoint.
        tensors: to be filled, by name in the whole model.
        hosts: as in ``write``.

    Raises:
        DamagedError: a tensor is missing, has another shape, or cannot be read.
    """
    fault = None
    try:
        _check_tensors(where, tensors)
    except DamagedError as error:
        fault = str(error)
    # A tensor may be missing that only one rank needs; the others must not wait for that rank.
    if told := next(filter(None, hosts.all_gather_object(fault)), None):
        raise DamagedError(told)
    reader = CheckedReader(where)
    try:
        with _one_process_is_fine(hosts):
            dcp.load(dict(tensors), storage_reader=reader, process_group=hosts.group)
    except CheckpointException as error:
        raise DamagedError(f"{where} cannot be read ({_causes(error)})") from error


def _check_tensors(where: Path, tensors: Mapping[str, BoxedTensor]) -> None:
    """Compare the tensors of this rank with those of a checkpoint.

    Raises:
        DamagedError: one is missing or has another shape, or it is not known what is there.
    """
    known = read_metadata(where).state_dict_metadata
    for name, tensor in tensors.items():
        saved = known.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            raise DamagedError(f"{where} has no tensor {name}")
        if saved.size != tensor.size():
            raise DamagedError(
                f"{where}: {name} has shape {list(saved.size)}, but this model needs "
                f"{list(tensor.size())}: give the flags of the model that was saved"
            )


def read_common(where: Path) -> dict[str, Any]:
    """Return what is not a tensor.

    Raises:
        DamagedError: the file cannot be read.
    """
    path = where / COMMON
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise DamagedError(f"{path} does not hold the values of a checkpoint")
    return content


def check_files(where: Path, hosts: ConnectedAxis) -> str | None:
    """Compare all files with the manifest; the ranks share the work, every rank calls it.

    Returns:
        What is wrong with the first damaged file, the same on every rank; ``None`` if nothing is.
    """
    try:
        listed = sorted(folder.read_manifest(where))
        problem = folder.problem_of(where, listed[hosts.rank :: hosts.size])
        for name in {COMMON, METADATA}.difference(listed):
            problem = (
                f"{where / folder.MANIFEST} does not list {name}, so that it cannot be checked"
            )
    except DamagedError as error:
        problem = str(error)
    return next(filter(None, hosts.all_gather_object(problem)), None)


def _write_tensors(
    partial: Path, tensors: Mapping[str, BoxedTensor], hosts: ConnectedAxis, files: int
) -> None:
    # Copying GPU tensors ahead takes a stream of the thread's current GPU. A thread that writes
    # copies on the host has none of its own, and would take the first GPU of the machine.
    ahead = _COPY_AHEAD if any(tensor.is_cuda for tensor in tensors.values()) else 0
    writer = dcp.FileSystemWriter(
        partial, sync_files=True, thread_count=files, per_thread_copy_ahead=ahead
    )
    with _one_process_is_fine(hosts):
        dcp.save(dict(tensors), storage_writer=writer, process_group=hosts.group)


def _digest_own(partial: Path, common: Common, hosts: ConnectedAxis) -> dict[str, FileDigest]:
    """Write the first rank's own file, and return the digests of the files of this rank."""
    own = [path for path in partial.iterdir() if path.name.startswith(f"__{hosts.rank}_")]
    if hosts.rank == 0:
        path = partial / COMMON
        with path.open("w", encoding="utf-8") as file:
            json.dump(common, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        own += [path, partial / METADATA]
    return {path.name: folder.digest(path) for path in own}


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


@contextmanager
def _one_process_is_fine(hosts: ConnectedAxis) -> Iterator[None]:
    """Silence PyTorch's warning that a job of one rank is a job of one rank."""
    with warnings.catch_warnings():
        if hosts.size == 1:
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
