"""Facts about the ranks of a job: their devices, and how many share a model."""

from megatron.flags.groups import Flags
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.settings import (
    DeviceSettings,
    PipelineRankSettings,
    TensorRankSettings,
)
from megatron.run.dry_run import DryRunSettings


def on_cuda(flags: Flags) -> bool:
    """Return whether the ranks compute on CUDA devices."""
    return flags[DeviceSettings].on_cuda


def ranks_of_replica(flags: Flags) -> int:
    """Return the number of ranks that work on a microbatch together: p x t x c.

    These are the pipeline-, tensor- and context-parallel ranks of a replica.
    """
    pipeline, tensor = flags[PipelineRankSettings].size, flags[TensorRankSettings].size
    return pipeline * tensor * flags[ContextRankSettings].size


def number_of_replicas(flags: Flags) -> int:
    """Return the number of replicas that the job's ranks make, or that a dry run names."""
    named = flags[DryRunSettings].dry_run_replicas if flags[DryRunSettings].dry_run else None
    return named or max(1, flags.world_size // ranks_of_replica(flags))
