"""Rules about activations on the host, and such activations as a dimension of ``auto``."""

from collections.abc import Iterator
from typing import Final

from megatron.flags.groups import Flags
from megatron.flags.rules import notes_in, refuses
from megatron.run.dimension import Auto, Dimension
from megatron.run.edit import Choice, Edit, left_out, set_to
from megatron.run.eight_bits import asks_for_engine
from megatron.run.parallelism import on_cuda
from megatron.run.schedule import chunks_of, schedule_of
from megatron.schedules.catalogue import TRAITS
from megatron.schedules.counted import counted
from megatron.schedules.settings import OffloadSettings, PlanSettings

OFFLOAD: Final = "--cpu-offload"
_CHUNKS: Final = "--offload-chunk-num"
HOST_FLAG: Final = f"{OFFLOAD} {_CHUNKS} auto"
"""The flags that leave the chunks on the host to the plan."""


@refuses
def _engine(flags: Flags) -> Iterator[str]:
    if flags[OffloadSettings].cpu_offload and asks_for_engine(flags):
        yield (
            f"{OFFLOAD} beside --transformer-impl transformer_engine: Transformer Engine keeps "
            "tensors in forms of its own, which are not copied to the host; leave out one of both"
        )


@refuses
def _too_many_chunks(flags: Flags) -> Iterator[str]:
    own, schedule = flags[OffloadSettings], TRAITS[schedule_of(flags)]
    if not own.cpu_offload or schedule.compares or flags[PlanSettings].schedule_file is not None:
        return  # schedules that are compared differ in chunks, and a plan of a file has its own
    chunks = chunks_of(flags) or schedule.chunks
    if (own.offload_chunk_num or 0) > chunks:
        yield (
            f"--offload-chunk-num {own.offload_chunk_num} is more than the "
            f"{counted(chunks, 'chunk')} of a rank: leave it out to copy all of them"
        )


@notes_in("real")
def _about_cpus(flags: Flags) -> Iterator[str]:
    if flags[OffloadSettings].host_bandwidth is not None and not on_cuda(flags):
        yield (
            "--host-bandwidth changes nothing: ranks on CPUs plan with free copies, until their "
            "time is measured"
        )
    if flags[OffloadSettings].host_memory is not None and not on_cuda(flags):
        yield (
            "--host-memory changes nothing: ranks on CPUs have one memory, and the check before a "
            "run knows its size"
        )


def _choices(flags: Flags) -> list[Choice]:
    """Return no chunks, half of the chunks of a rank, and all of them.

    Where ``auto`` compares schedules, their chunks differ: then one chunk stands for half of them.
    """
    schedule = TRAITS[schedule_of(flags)]
    chunks = chunks_of(flags) or schedule.chunks
    half = 1 if schedule.compares else chunks // 2
    some: list[Choice] = [(Edit(OFFLOAD), set_to(_CHUNKS, half))] if half else []
    none, every = (left_out(OFFLOAD), left_out(_CHUNKS)), (Edit(OFFLOAD), left_out(_CHUNKS))
    return [none, *some, every]


HOST: Final = Dimension(
    "activations on the host",
    "factor",
    (OFFLOAD, _CHUNKS),
    _choices,
    auto=Auto(HOST_FLAG, lambda flags: flags[OffloadSettings].compares),
    nothing="nothing on the host",
)
"""Activations on the host as a dimension that the plan chooses in."""
