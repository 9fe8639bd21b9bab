"""Advice for a rank that runs out of GPU memory.

The advice is prepared before training, because a rank without memory ends at once.
"""

from dataclasses import replace
from typing import Final

import torch

from megatron.planning.forecast_run import forecast_run
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_memory import Fullest
from megatron.planning.what_would_fit import what_would_fit
from megatron.run.run_config import RunConfig
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import USABLE
from megatron.simulator.units import MEMORY

PREPARE_SECONDS: Final = 3.0
"""Seconds of work of the search for settings that hold less. Every start on GPUs takes about so
much longer."""

_ASK: Final = "--dry-run --dry-run-gpu NAME with the same flags"


def prepared_advice(
    config: RunConfig,
    run_plan: RunPlan,
    pipeline_rank: int,
    seconds: float = PREPARE_SECONDS,
) -> tuple[str, ...]:
    """Return the memory that the dry run counts for a rank, and settings with less memory.

    The rank may run out of memory although its counted memory fits. So it is not enough that the
    count of a setting fits: the fullest rank of a named setting must hold less than the fullest
    rank of this run.

    The search for other settings takes ``seconds`` of work.

    Returns:
        The lines of the advice; none for a run on CPUs.
    """
    if config.parallel.devices.device != "cuda":
        return ()
    gpu = config.parallel.gpu
    if config.train.dtype == torch.float32:
        return (f"{_ASK}, with --bf16, says what would fit",)
    if gpu is None:
        return (f"{_ASK} says what would fit",)
    found = forecast_run(config, run_plan, gpu)
    peak, memory = found.outcome.peak[pipeline_rank], found.memories[pipeline_rank]
    own = Fullest(pipeline_rank, peak, memory.always, memory.outside)
    less = min(gpu.memory, (found.fullest.peak + found.fullest.outside - 1) / USABLE)
    told = what_would_fit(
        config,
        replace(gpu, memory=less),
        found.fullest,
        Watch().counting(seconds),
        more=f"{_ASK} tries more",
    )
    return (
        f"the dry run counts {MEMORY.write(peak)} at most on pipeline rank {pipeline_rank}, and "
        f"{own.room_in_words(gpu)}; settings that it counts less "
        "for:",
        told,
    )
