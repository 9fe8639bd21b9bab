"""The output files of a run, and the check before training that they can be written.

If a file cannot be written later, because the disk is full, the run says so and goes on: a trace is
not worth days of lost training.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.checkpoint.folder import POINTER
from megatron.checkpoint.lock import NoLockError, check_name
from megatron.native.files import FileKindError, temporary_name, unlinked
from megatron.run.log import LogSettings
from megatron.run.records import RecordSettings
from megatron.training.metrics.json_lines import check_json_lines
from megatron.training.metrics.progress_file import FILE as PROGRESS

PLANNED, TRACE = ".planned.json", ".trace.json"
"""Endings of the files that are written beside the file of ``--record-timeline``."""


def check_outputs(log: LogSettings, rank: int, save: Path | None = None) -> None:
    """Make the folders that ``rank`` will write to, and check that its files can be written.

    Only the folders are left behind, and existing files keep their content.

    Every rank writes to ``save``, the folder of the checkpoints.

    Raises:
        ValueError: a file cannot be written, or the run would append to a file of another kind;
            the message names the flag, the path, the reason and a way out.
    """
    for flag, path in _files(log, rank, save):
        try:
            _check_file(path)
        except OSError as error:
            raise ValueError(
                f"{flag} {path} cannot be written ({error}): give a path in a folder that this "
                "user may write to"
            ) from error
    if rank == 0 and save is not None:
        try:
            check_name(save)
        except NoLockError as error:
            raise ValueError(f"--save: {error}, or name another folder") from error
    progress = log.records.progress_folder
    if rank == 0 and progress is not None:
        _check_appended(progress / PROGRESS)
    if rank == 0 and log.records.log_jsonl is not None:
        check_json_lines(log.records.log_jsonl)


def why_unwritten(flag: str, write: Callable[[], object]) -> str | None:
    """Write files; if that fails, return the reason for the log, and the run goes on."""
    try:
        write()
    except OSError as error:
        return f"{flag}: {error}; the run goes on without it"
    return None


def _files(log: LogSettings, rank: int, save: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield the files of ``rank``: its own, and on rank 0 the files about all ranks."""
    if save is not None:
        yield "--save", save / POINTER
    if log.profile:
        yield "--profile-dir", log.profile_dir / f"trace.rank{rank}.json"
    if rank > 0:
        return
    if log.save_measured_costs is not None:
        yield "--save-measured-costs", log.save_measured_costs
    if log.record_timeline is not None:
        yield "--record-timeline", log.record_timeline
        for ending in (PLANNED, TRACE):
            yield "--record-timeline", log.record_timeline.with_suffix(ending)
    yield from _records(log.records)


def _records(records: RecordSettings) -> Iterator[tuple[str, Path]]:
    if records.log_jsonl is not None:
        yield "--log-jsonl", records.log_jsonl
    if records.tensorboard_dir is not None:
        yield "--tensorboard-dir", records.tensorboard_dir / "events"
    if records.wandb_project is not None and records.wandb_save_dir is not None:
        yield "--wandb-save-dir", records.wandb_save_dir / "run"


def _check_appended(path: Path) -> None:
    """Refuse a link or a pipe under the name of a file of ``--save`` to which lines are appended.

    Raises:
        ValueError: the file is refused.
        OSError: the file cannot be written.
    """
    if os.path.lexists(path):
        try:
            open(path, "ab", opener=unlinked).close()
        except FileKindError as error:
            raise ValueError(
                f"--log-progress: {path} {error.fault}: remove it, or leave the flag out"
            ) from error


def _check_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_fifo():  # opening it waits for a reader, perhaps for ever
        raise OSError("it is a pipe")
    if path.exists():
        path.open("ab").close()
    if not path.exists() or path.is_file():  # written under another name, and then renamed
        probe = temporary_name(path)
        probe.touch()
        probe.unlink()
