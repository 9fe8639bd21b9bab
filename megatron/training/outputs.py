"""The files that a run leaves: found writable before it trains, not after it has."""

from collections.abc import Iterator
from pathlib import Path

from megatron.config.run_config import LogConfig
from megatron.native.files import temporary_name

PLANNED, TRACE = ".planned.json", ".trace.json"
"""Endings of what stands beside the file of ``--record-timeline``."""


def check_outputs(log: LogConfig, rank: int) -> None:
    """Make the folders that ``rank`` will write to, and see that its files can be written.

    Nothing is left behind but the folders, and nothing in a file that exists is touched.

    Raises:
        ValueError: naming the flag, the path, the reason and a way out.
    """
    for flag, path in _files(log, rank):
        try:
            _check_file(path)
        except OSError as error:
            raise ValueError(
                f"{flag} {path} cannot be written ({error}): give the path of a file in a folder "
                "that this user may write to"
            ) from error


def _files(log: LogConfig, rank: int) -> Iterator[tuple[str, Path]]:
    """Yield what ``rank`` writes: the traces of its own, and on rank 0 what is of all ranks."""
    if log.profile:
        yield "--profile-dir", log.profile_dir / f"trace.rank{rank}.json"
    if rank > 0:
        return
    if log.schedule_costs is not None:
        yield "--schedule-costs", log.schedule_costs
    if log.record_timeline is not None:
        yield "--record-timeline", log.record_timeline
        for ending in (PLANNED, TRACE):
            yield "--record-timeline", log.record_timeline.with_suffix(ending)


def _check_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.open("ab").close()
    else:
        probe = temporary_name(path)
        probe.touch()
        probe.unlink()
