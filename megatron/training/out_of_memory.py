"""What a rank says that runs out of GPU memory: where it was, what it held, and what would fit.

The rank also writes a snapshot of its allocator, for https://pytorch.org/memory_viz.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from megatron.config.run_config import LogConfig, RunConfig
from megatron.runtime.position import Position
from megatron.runtime.store import ActivationStore
from megatron.schedules.counted import counted
from megatron.schedules.lower import Run
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import USABLE, Gpu, gpu_of_driver
from megatron.simulator.units import MEMORY
from megatron.training.planning.forecast_run import forecast_run
from megatron.training.planning.run_plan import RunPlan
from megatron.training.planning.what_would_fit import what_would_fit
from megatron.training.rendezvous import UserError
from megatron.training.setup import TrainState

ADVICE_SECONDS: Final = 20.0
"""Time of the search for settings that would fit; the other ranks wait meanwhile."""

HISTORY: Final = 100_000
"""Allocations that PyTorch remembers."""


class OutOfMemoryError(UserError):
    """A rank has run out of memory; the message says what to do."""


@dataclass(frozen=True)
class Device:
    """The GPU of a rank.

    Attributes:
        name: by the driver.
        memory: bytes.
        gpu: what is known of it; ``None``: it is in no table.
        allocated: bytes of tensors.
        reserved: bytes that PyTorch has taken from the driver.
    """

    name: str
    memory: int
    gpu: Gpu | None
    allocated: int
    reserved: int

    @classmethod
    def current(cls) -> "Device":
        """Return the GPU of this process."""
        name, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
        known = gpu_of_driver(name)
        return cls(
            name,
            memory,
            None if known is None else replace(known, memory=float(memory)),
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
        )


def record_memory(log: LogConfig, device: torch.device) -> None:
    """Let PyTorch remember who allocates memory on a GPU, if the run asks for it."""
    if log.record_memory_history and device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=HISTORY)


def explained(
    error: Exception, config: RunConfig, state: TrainState | None, rank: int
) -> Exception:
    """Return an error that says what to do if ``error`` says that GPU memory is out; else itself.

    Args:
        error: why the rank cannot go on.
        config: the run.
        state: this rank, if it is built already.
        rank: of the job.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    device, lines = Device.current(), [f"rank {rank} is out of memory"]
    if state is not None:
        pipeline = state.pipeline
        lines = [f"rank {rank} is out of memory in {where(pipeline.position, pipeline.store)}"]
    lines += [*_figures(device), *_snapshot(config.log.memory_snapshot_path, rank)]
    if state is not None:
        lines += advice(config, state.run_plan, state.groups.pipeline.rank, device)
    return OutOfMemoryError("\n".join(lines))


def where(position: Position, store: ActivationStore) -> str:
    """Return what a rank does, and which activations it holds, in words."""
    step, phase = position.instruction, position.phase
    if step is not None:
        done = f"instruction {position.at + 1} of {len(position.row)}"
        what = step.item if isinstance(step, Run) else step.comm
        phase = f"{phase}, at {what} ({done})"
    held = store.in_flight
    if not held:
        return f"{phase}; it holds no microbatch"
    named = " ".join(f"{microbatch}.{chunk}" for microbatch, chunk in held)
    count = counted(len(held), "activation")
    return f"{phase}; it holds {count} of microbatches, with their chunks: {named}"


def _figures(device: Device) -> Iterator[str]:
    yield (
        f"{device.name} has {MEMORY.write(device.memory)}: tensors take "
        f"{MEMORY.write(device.allocated)} of {MEMORY.write(device.reserved)} that PyTorch holds"
    )


def _snapshot(path: Path, rank: int) -> Iterator[str]:
    """Write the allocator's state; yield where it is."""
    own = path.with_name(f"{path.stem}-{rank}{path.suffix}")
    with suppress(OSError, RuntimeError):  # the message is worth more than the file
        own.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(own))
        yield f"{own} has all blocks of memory: drop it on https://pytorch.org/memory_viz"


def advice(
    config: RunConfig, run_plan: RunPlan, pipeline_rank: int, device: Device
) -> Sequence[str]:
    """Return what the dry run says of this rank's memory, and what it would run instead."""
    ask = "--dry-run --dry-run-gpu NAME with the same flags says what would fit"
    if device.gpu is None or config.train.dtype == torch.float32:
        return [ask + ("" if config.train.dtype != torch.float32 else ", with --bf16")]
    found = forecast_run(config, run_plan, device.gpu)
    peak = found.outcome.peak[pipeline_rank]
    said = [
        f"the dry run counts {MEMORY.write(peak)} at most on pipeline rank {pipeline_rank}, of "
        f"which tensors can use {MEMORY.write(device.gpu.usable)}"
    ]
    # What is counted as this run is, and fits by the count only, is no way out.
    less = min(device.gpu.memory, (max(found.outcome.peak) - 1) / USABLE)
    smaller = replace(device.gpu, memory=less)
    return [*said, what_would_fit(config, smaller, found.fullest, Watch(ADVICE_SECONDS))]
