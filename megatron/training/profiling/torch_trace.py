"""PyTorch profiler traces of a few iterations, one file per rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from megatron.config.run_config import LogConfig


class Steps(Protocol):
    """Is told after every iteration."""

    def step(self) -> None:
        """Note the end of an iteration."""
        ...


class _NoProfiler:
    def step(self) -> None:
        """Do nothing: this run is not traced."""


@contextmanager
def profiler(config: LogConfig, rank: int) -> Iterator[Steps]:
    """Trace the iterations ``profile_step_start`` to ``profile_step_end`` (exclusive, from 1).

    The traces open in Perfetto or chrome://tracing.
    """
    if not config.profile:
        yield _NoProfiler()
        return
    config.profile_dir.mkdir(parents=True, exist_ok=True)
    path = config.profile_dir / f"trace.rank{rank}.json"
    active = config.profile_step_end - config.profile_step_start
    warmup = min(1, config.profile_step_start - 1)
    schedule = torch.profiler.schedule(
        wait=config.profile_step_start - 1 - warmup, warmup=warmup, active=active, repeat=1
    )
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=lambda trace: trace.export_chrome_trace(str(path))
    ) as profile:
        yield profile
