"""The seconds and bytes by which ``auto`` compares plans for a GPU."""

from dataclasses import dataclass

from megatron.config.run_config import RunConfig
from megatron.schedules.search.bound import least_time_by
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import Gpu
from megatron.training.planning.candidate import Candidate, RunPlan
from megatron.training.planning.estimate import Estimate, estimate
from megatron.training.planning.forecast_run import RunForecast, forecast_run
from megatron.training.planning.least_memory import least_memory


@dataclass(frozen=True)
class Pricing:
    """Predicts plans of one run on one GPU.

    Attributes:
        config: the run, with one treatment of the vocabulary.
        gpu: of every rank.
    """

    config: RunConfig
    gpu: Gpu

    def forecast(self, run_plan: RunPlan) -> RunForecast:
        """Return the forecast of a plan."""
        return forecast_run(self.config, run_plan, self.gpu)

    def estimate(self, candidate: Candidate, watch: Watch) -> Estimate:
        """Return what a plan of few microbatches that is found quickly says of a candidate.

        Args:
            candidate: the candidate.
            watch: ends the search for that plan.
        """
        return estimate(self.config, candidate, self.gpu, watch, quick=True)

    def least_seconds(self, one: RunPlan, microbatches: int) -> float:
        """Return a lower bound of the seconds of an iteration under every plan.

        Args:
            one: a plan of the schedule for one microbatch.
            microbatches: of the iteration.
        """
        found = self.forecast(one)
        times = {
            (span.rank, span.label): span.end - span.start
            for span in found.timeline.spans
            if span.lane == "compute"
        }
        least = least_time_by(
            one.plan,
            lambda rank, item: times[rank, str(item)],
            microbatches,
            one.plan.treatment.contributing,
        )
        return least + found.outcome.once + found.outcome.step

    def can_fit(self, candidate: Candidate) -> bool:
        """Whether some plan of a candidate may fit: its least memory is within the GPU's."""
        return least_memory(self.config, candidate).peak <= self.gpu.usable
