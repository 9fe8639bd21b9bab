"""The memory of the paper's models: the bytes that the CUDA code allocates, and a dry run's."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from correctness.short_runs import Job, Layout
from pretended_gpu.pool import GpuPool
from pretended_gpu.rank import Findings, run_rank
from reference.plain_gpt import GPTOptions

from megatron.parallel.settings import DeviceSettings
from megatron.planning.forecast_run import forecast_run
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.schedules.settings import OffloadSettings
from megatron.simulator.costs.gpus import GIB, gpu


@dataclass(frozen=True)
class RankMemory:
    """GiB of every rank.

    Attributes:
        allocated: at most, by the CUDA code on a pretended GPU.
        predicted: by a dry run.
        faults: what else was found.
        host: of the host, at most in tensors; a pretended GPU's run holds batches there too.
        pinned: of them pinned, at most.
        host_predicted: of the host by a dry run: activations, and states of the optimizer.
        pinned_predicted: of them activations, which are pinned.
    """

    allocated: list[float]
    predicted: list[float]
    faults: list[str]
    host: list[float]
    pinned: list[float]
    host_predicted: list[float]
    pinned_predicted: list[float]


def paper_config(
    layout: Layout,
    vocab_size: int,
    layers: int = 32,
    sequence: int = 2048,
    dropout: float = 0.0,
    micro_batch_size: int = 1,
    **options: Any,
) -> RunConfig:
    """Layers of 3072, in bf16, not tied; microbatches enough for every pipeline to fill."""
    model = {
        "num_layers": layers,
        "hidden_size": 3072,
        "ffn_hidden_size": 4 * 3072,
        "num_attention_heads": 24,
        "num_query_groups": 24,
        "kv_channels": 128,
        "max_position_embeddings": sequence,
        "vocab_size": vocab_size,
        "tie_embeddings": False,
    }
    job = Job(
        GPTOptions(**(model | options)),
        micro_batch_size=micro_batch_size,
        microbatches=layout.ranks + 2,
        sequence=sequence,
        dropout=dropout,
    )
    return job.config(layout, torch.bfloat16)


def moving(config: RunConfig, chunks: int | None) -> RunConfig:
    """The run on A100s with so many chunks of a rank on the host; ``None``: all on the device.

    The link is so quick that nearly all activations are moved.
    """
    parallel = replace(
        config.parallel,
        devices=DeviceSettings("cuda", "nccl"),
        gpu=gpu("A100"),
        offload=OffloadSettings(chunks is not None, chunks, 1000.0),
    )
    return replace(config, parallel=parallel)


def memory(
    config: RunConfig, gpus: GpuPool, run: Callable[[RunConfig, int], Findings] | None = None
) -> RankMemory:
    """Return the memory of every rank of ``config``'s job.

    Args:
        config: the job.
        gpus: they are not there.
        run: what a rank does; ``None``: ``until_full``.
    """
    grid = config.parallel.grid
    found = gpus.map(run or until_full, config, ranks=grid.world_size)
    # What a dry run prints is rounded to a tenth of a GiB, more than a percent of a small model's.
    # The pretended GPU is a Hopper, whose kernels for attention to a part of the keys are counted.
    counted = config
    if config.parallel.gpu is None:
        counted = replace(config, parallel=replace(config.parallel, gpu=gpu("H100")))
    forecast = forecast_run(counted, make_run_plan(config), gpu("A100"))
    predicted, moved = forecast.outcome.peak, forecast.activations_on_host
    places = [grid.coordinates(rank).pipeline for rank in range(grid.world_size)]
    return RankMemory(
        [own.peak / GIB for own in found],
        [predicted[place] / GIB for place in places],
        [fault for own in found for fault in own.faults],
        [own.host / GIB for own in found],
        [own.pinned / GIB for own in found],
        [(moved[place] + forecast.memories[place].on_host) / GIB for place in places],
        [moved[place] / GIB for place in places],
    )


def until_full(config: RunConfig, rank: int) -> Findings:
    """The second iteration has the optimizer's moments, the third the copy of them, if any."""
    return run_rank(
        config, rank, iterations=3 if config.optimizer.post_validation else 2, valid=False
    )
