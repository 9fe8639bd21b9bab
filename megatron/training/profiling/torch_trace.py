"""PyTorch profiler traces of a few iterations, one file per rank."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from megatron.config.log import LogConfig
from megatron.native.files import atomic_path
from megatron.training.outputs import why_unwritten


class Steps(Protocol):
    """Is told after every iteration."""

    def step(self) -> None:
        """Note the end of an iteration."""
        ...


class _NoProfiler:
    def step(self) -> None:
        """Do nothing: this run is not traced."""


@contextmanager
def profiler(config: LogConfig, rank: int, say: Callable[..., None] = print) -> Iterator[Steps]:
    """Trace the iterations ``profile_step_start`` to ``profile_step_end`` (exclusive, from 1).

    The traces open in Perfetto or chrome://tracing.

    Args:
        config: which iterations and ranks are traced, and the folder of the traces.
        rank: of the job.
        say: prints why a trace could not be written.
    """
    if not config.profile or (config.profile_ranks and rank not in config.profile_ranks):
        yield _NoProfiler()
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
            say(unwritten, flush=True)

    with torch.profiler.profile(
        schedule=schedule,
        on_trace_ready=keep,
        record_shapes=config.pytorch_profiler_collect_shapes,
    ) as profile:
        yield profile


def _write(trace: torch.profiler.profile, path: Path) -> None:
    """Write a trace, complete or not at all.

    Raises:
        OSError: it cannot be written. The profiler itself says nothing of a full disk.
    """
    with atomic_path(path) as temporary:
        trace.export_chrome_trace(str(temporary))
        with temporary.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(-min(16, size), os.SEEK_END)
            if not file.read().rstrip().endswith(b"}"):
                raise OSError(f"{path} was cut short after {size} bytes: the disk may be full")
