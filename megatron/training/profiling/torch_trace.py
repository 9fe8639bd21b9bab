"""PyTorch profiler traces of a few iterations, one file per rank."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron.native.files import atomic_path
from megatron.run.log import LogSettings
from megatron.training.metrics.log import print_now
from megatron.training.outputs import why_unwritten


@contextmanager
def profiler(
    config: LogSettings, rank: int, say: Callable[[str], None] = print_now
) -> Iterator[Callable[[], None]]:
    """Trace the iterations from ``profile_step_start`` to the one before ``profile_step_end``.

    Iterations are numbered from 1.

    The traces open in Perfetto or chrome://tracing.

    ``say`` prints why a trace could not be written.

    Yields:
        A function to call after every iteration.
    """
    if not config.profile or (config.profile_ranks and rank not in config.profile_ranks):
        yield lambda: None  # this run is not traced
        return
    config.profile_dir.mkdir(parents=True, exist_ok=True)
    path = config.profile_dir / f"trace.rank{rank}.json"
    active = config.profile_step_end - config.profile_step_start
    warmup = min(1, config.profile_step_start - 1)
    schedule = torch.profiler.schedule(
        wait=config.profile_step_start - 1 - warmup, warmup=warmup, active=active, repeat=1
    )

    def keep(trace: torch.profiler.profile) -> None:
        unwritten = why_unwritten("--profile-dir", lambda: _write(trace, path))
        if unwritten is not None:
            say(unwritten)

    with torch.profiler.profile(
        schedule=schedule,
        on_trace_ready=keep,
        record_shapes=config.pytorch_profiler_collect_shapes,
        acc_events=True,  # there is one cycle; PyTorch 2.11 warns that it forgets earlier ones
    ) as profile:
        yield profile.step


def _write(trace: torch.profiler.profile, path: Path) -> None:
    """Write a trace, complete or not at all.

    Raises:
        OSError: the trace cannot be written. The profiler itself does not report a full disk.
    """
    with atomic_path(path) as temporary:
        trace.export_chrome_trace(str(temporary))
        with temporary.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(-min(16, size), os.SEEK_END)
            if not file.read().rstrip().endswith(b"}"):
                raise OSError(f"{path} was cut short after {size} bytes: the disk may be full")
