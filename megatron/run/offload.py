"""Activations on the host: the flags, and what they exclude.

The names are those of the zero-bubble fork (PipeOffload, arXiv 2503.01328).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from megatron.flags.auto import AUTO, number_or_auto
from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import BANDWIDTH, Range
from megatron.flags.rules import notes_in, refuses
from megatron.run.dimension import Dimension, NamedChoice
from megatron.run.edit import Edit, left_out, set_to
from megatron.run.eight_bits import asks_for_engine
from megatron.run.parallelism import on_cuda
from megatron.run.schedule import PipelineFlags, chunks_of, schedule_of
from megatron.schedules.catalogue import TRAITS
from megatron.schedules.counted import counted
from megatron.simulator.costs.gpus import GIB

OFFLOAD: Final = "--cpu-offload"
_CHUNKS: Final = "--offload-chunk-num"
ALL_CHUNKS: Final = 1_000_000
"""More chunks than a rank can have."""
_MEMORY: Final = Range(1e-3, 1e6)


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class OffloadFlags:
    """Activations that wait on the host."""

    cpu_offload: bool = flag(False,
        "Copy the activations of chunks to the host after their forward, and back before their "
        "backward, as many as the link to the host has time for.")
    offload_chunk_num: int | None = flag(None,
        "Chunks of every rank whose activations are copied: those that wait longest. auto: none, "
        "half of them or all, whichever makes the run the fastest that fits the job's GPUs by "
        "prediction, or one nearly as fast that holds less.",
        reads=number_or_auto, metavar="N|auto", unset="all chunks", idle_without=OFFLOAD)
    host_bandwidth: float | None = flag(None,
        "GB/s in one direction between a GPU and its host, for plans and predictions.", BANDWIDTH,
        unset="by the GPU", idle_without=f"{OFFLOAD} or --optimizer-cpu-offload")
    host_memory: float | None = flag(None,
        "GiB of the memory of a machine, which must have room for all that the machine's ranks "
        "keep on their host.", _MEMORY, unset="as much as the machine has; in a dry run, not known",
        idle_without=f"{OFFLOAD} or --optimizer-cpu-offload")
# fmt: on


def offloaded_chunks(flags: Flags) -> int | None:
    """Return the number of chunks of a rank whose activations wait on the host.

    ``None``: no flag asks for it. The number may be larger than the number of chunks.
    """
    own = flags[OffloadFlags]
    return (own.offload_chunk_num or ALL_CHUNKS) if own.cpu_offload else None


def host_bandwidth(flags: Flags) -> float | None:
    """Return the bandwidth between a GPU and its host in bytes/s, if a flag gives it."""
    given = flags[OffloadFlags].host_bandwidth
    return None if given is None else 1e9 * given


def host_memory(flags: Flags) -> float | None:
    """Return the bytes of a machine's memory, if a flag gives them."""
    given = flags[OffloadFlags].host_memory
    return None if given is None else GIB * given


@refuses
def _engine(flags: Flags) -> Iterator[str]:
    if flags[OffloadFlags].cpu_offload and asks_for_engine(flags):
        yield (
            f"{OFFLOAD} beside --transformer-impl transformer_engine: Transformer Engine keeps "
            "tensors in forms of its own, which are not copied to the host; leave out one of both"
        )


@refuses
def _too_many_chunks(flags: Flags) -> Iterator[str]:
    own, schedule = flags[OffloadFlags], TRAITS[schedule_of(flags)]
    if not own.cpu_offload or schedule.compares or flags[PipelineFlags].schedule_file is not None:
        return  # schedules that are compared differ in chunks, and a plan of a file has its own
    chunks = chunks_of(flags) or schedule.chunks
    if (own.offload_chunk_num or 0) > chunks:
        yield (
            f"--offload-chunk-num {own.offload_chunk_num} is more than the "
            f"{counted(chunks, 'chunk')} of a rank: leave it out to copy all of them"
        )


@notes_in("real")
def _about_cpus(flags: Flags) -> Iterator[str]:
    if flags[OffloadFlags].host_bandwidth is not None and not on_cuda(flags):
        yield (
            "--host-bandwidth changes nothing: ranks on CPUs plan with free copies, until their "
            "time is measured"
        )
    if flags[OffloadFlags].host_memory is not None and not on_cuda(flags):
        yield (
            "--host-memory changes nothing: ranks on CPUs have one memory, and the check before a "
            "run knows its size"
        )


def _choices(flags: Flags) -> list[NamedChoice]:
    """Return no chunks, half of the chunks of a rank, and all of them.

    Where ``auto`` compares schedules, their chunks differ: then one chunk stands for half of them.
    """
    schedule = TRAITS[schedule_of(flags)]
    chunks = chunks_of(flags) or schedule.chunks
    half = 1 if schedule.compares else chunks // 2
    none = NamedChoice((left_out(OFFLOAD), left_out(_CHUNKS)), "nothing on the host")
    some = [NamedChoice((Edit(OFFLOAD), set_to(_CHUNKS, half)))]
    return [none, *(some if half else []), NamedChoice((Edit(OFFLOAD), left_out(_CHUNKS)))]


HOST: Final = Dimension(
    f"{OFFLOAD} {_CHUNKS} auto",
    lambda flags: flags[OffloadFlags].cpu_offload and flags[OffloadFlags].offload_chunk_num == AUTO,
    _choices,
)
"""Activations on the host as a dimension that the plan chooses in."""
