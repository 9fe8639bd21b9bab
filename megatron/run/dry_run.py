"""The settings of a dry run."""

from dataclasses import dataclass
from typing import Final

from megatron.flags.declare import flag
from megatron.flags.ranges import BANDWIDTH, LATENCY, RANKS, STRETCH
from megatron.simulator.costs.gpus import GPUS

_USUAL_GPU: Final = "A100"


@dataclass(frozen=True)
class DryRunSettings:
    """A prediction in place of a run."""

    # fmt: off
    dry_run: bool = flag(False,
        "Predict the plan, its time and its memory, and start nothing. No ranks, devices or data "
        "are needed.")
    dry_run_gpu: str | None = flag(None, "The GPU to predict for.", unset=_USUAL_GPU,
        choices=tuple(GPUS), any_case=True, needs="--dry-run")
    dry_run_replicas: int | None = flag(None, "Replicas of the model to predict for.", RANKS,
        unset="1", needs="--dry-run")
    dry_run_replica_bandwidth: float | None = flag(None,
        "GB/s in one direction from a rank to its replica in another machine.", BANDWIDTH,
        unset="by the GPU", needs="--dry-run-replicas")
    dry_run_replica_latency: float | None = flag(None,
        "Microseconds that a step from a rank to its replica takes besides the time of its bytes.",
        LATENCY, unset="10", needs="--dry-run-replicas")
    dry_run_expert_imbalance: float = flag(1.0,
        "Tokens at the experts of a stage's busiest rank, divided by the mean of all ranks. Every "
        "microbatch and layer counts so.", STRETCH, needs="--dry-run",
        idle_without="--expert-model-parallel-size")
    # fmt: on

    @property
    def gpu(self) -> str:
        """Name of the GPU to predict for."""
        return self.dry_run_gpu or _USUAL_GPU

    @property
    def replica_bandwidth(self) -> float | None:
        """Bytes/s in one direction from a rank to its replica; ``None``: as usual for the GPU."""
        given = self.dry_run_replica_bandwidth
        return None if given is None else 1e9 * given

    @property
    def replica_latency(self) -> float | None:
        """Seconds of a step from a rank to its replica; ``None``: the usual time."""
        given = self.dry_run_replica_latency
        return None if given is None else 1e-6 * given
