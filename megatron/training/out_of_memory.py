"""The message of a rank that runs out of memory: its place, its activations, and a way out.

Settings that would fit on GPUs are known before training begins (``planning/prepared_advice``). A
rank on a GPU also writes a snapshot of its allocator, for https://pytorch.org/memory_viz.
"""

import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from megatron.native.files import atomic_path
from megatron.planning.host_room import machine_memory
from megatron.run.log import LogSettings
from megatron.runtime.position import Position
from megatron.runtime.store import ActivationStore
from megatron.schedules.counted import counted
from megatron.schedules.lower import Run
from megatron.simulator.units import MEMORY
from megatron.training.rendezvous import UserError
from megatron.training.setup import TrainState

HISTORY: Final = 100_000
"""Number of allocations that PyTorch remembers."""


class OutOfMemoryError(UserError):
    """A rank has run out of memory; the message says what to do."""


@dataclass(frozen=True)
class Device:
    """The GPU of a rank.

    ``reserved`` are the bytes that PyTorch has taken from the driver, and ``allocated`` are the
    bytes of tensors.
    """

    name: str
    memory: int
    allocated: int
    reserved: int

    @classmethod
    def current(cls) -> "Device":
        """Return the GPU of this process."""
        return cls(
            torch.cuda.get_device_name(),
            torch.cuda.mem_get_info()[1],
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
        )


def record_memory(log: LogSettings, device: torch.device) -> None:
    """Let PyTorch remember which code allocates memory on a GPU, if the run asks for it."""
    if log.record_memory_history and device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=HISTORY)


def explained(
    error: Exception,
    log: LogSettings,
    state: TrainState | None,
    rank: int,
    advice: Sequence[str] = (),
) -> Exception:
    """Return an error that says what to do if memory is out; otherwise return ``error`` itself.

    The search for settings that fit was made before training, and ``advice`` is its result: now the
    other ranks wait for this rank to end. ``state`` is this rank, if it is built already.
    """
    of_gpu = isinstance(error, torch.OutOfMemoryError)
    if not of_gpu and not _is_of_host(error):
        return error
    lines = [f"rank {rank} is out of memory"]
    if state is not None:
        pipeline = state.pipeline
        lines = [f"rank {rank} is out of memory in {where(pipeline.position, pipeline.store)}"]
    if of_gpu:
        lines += [*_figures(Device.current()), *_snapshot(log.memory_snapshot_path, rank), *advice]
    else:
        lines += _of_host(error)
    return OutOfMemoryError("\n".join(lines))


def _is_of_host(error: Exception) -> bool:
    """Whether the host's memory is out; PyTorch raises a ``RuntimeError`` with these words."""
    if isinstance(error, RuntimeError):
        return "DefaultCPUAllocator: can't allocate memory" in str(error)
    return isinstance(error, MemoryError)


def _of_host(error: Exception) -> Iterator[str]:
    held = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield (
        f"this machine has {MEMORY.write(machine_memory())} for all its processes, and this one "
        f"held {MEMORY.write(held)} at most: {str(error).partition('DefaultCPUAllocator: ')[2]}"
    ).removesuffix(": ")
    yield (
        "lower --micro-batch-size or --seq-length, compute layers again "
        "(--recompute-activations, or --recompute-granularity full --recompute-method uniform), or "
        "spread the model over more machines (--pipeline-model-parallel-size)"
    )


def where(position: Position, store: ActivationStore) -> str:
    """Return what a rank does, and which activations it holds, in words."""
    step, phase = position.instruction, position.phase
    if step is not None:
        done = f"instruction {position.at + 1} of {len(position.row)}"
        what = step.name if isinstance(step, Run) else step.comm
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
    """Write the allocator's state to a file; yield a line with the path."""
    own = path.with_name(f"{path.stem}-{rank}{path.suffix}")
    with suppress(OSError, RuntimeError):  # the message is worth more than the file
        own.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(own) as temporary:
            torch.cuda.memory._dump_snapshot(str(temporary))
        yield f"{own} has all blocks of memory: drop it on https://pytorch.org/memory_viz"
