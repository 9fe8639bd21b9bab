"""Jobs of Llama 3: the fastest plan of each treatment of the vocabulary, and its losses.

A loss is the time that a plan saves on a machine without the loss: the same plan is simulated again
on that machine.
"""

from dataclasses import replace
from typing import Final, NamedTuple

from megatron.planning.forecast_run import RunForecast, forecast_run
from megatron.planning.run_costs import cluster_of
from megatron.planning.run_plan import asked
from megatron.run.recompute import EVERY_LAYER
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.cluster import Cluster, SpreadAxis
from megatron.simulator.costs.collective_time import Links
from megatron.simulator.costs.count import CollectiveKind, Launch
from megatron.simulator.costs.gpus import GIB, GPUS
from megatron.simulator.costs.launch_time import Rates
from tools.predictions.scenarios import Scenario

TREATMENTS: Final = ("none", "redis", "vocab-1", "vocab-2")
VOCABULARIES: Final = {"32k": 32_000, "128k": 128_256, "256k": 256_000}


class Job(NamedTuple):
    """A model on GPUs.

    Attributes:
        gpu: their name.
        model: its name.
        tensor: ranks that share a layer.
        pipeline: pipeline ranks.
        schedules: tried, with the chunks of a rank behind a slash.
        replicas: of the model, which share the optimizer (ZeRO-1).
    """

    gpu: str
    model: str
    tensor: int
    pipeline: int
    schedules: tuple[str, ...]
    replicas: int = 1

    @property
    def microbatches(self) -> int:
        """Of a replica, of one sequence each."""
        return max(32, 4 * self.pipeline)

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.tensor * self.pipeline * self.replicas

    @property
    def words(self) -> str:
        """GPUs, model and layout, as cells of a table."""
        return f"{self.gpus} {self.gpu} | {self.model} | {self.tensor}, {self.pipeline}"

    def config(self, treatment: str, vocabulary: int, schedule: str, more: str = "") -> RunConfig:
        """Return the run.

        Args:
            treatment: of the vocabulary.
            vocabulary: its entries.
            schedule: as in ``schedules``.
            more: further flags.
        """
        job = Scenario(self.model, self.gpu, self.pipeline, self.replicas, self.tensor, more=more)
        samples = self.microbatches * self.replicas
        of_model = job._replace(vocabulary=vocabulary, seq_length=8192, samples=samples)
        return of_model._replace(schedule=schedule, treatment=treatment).config


_WHOLE: Final = ("1f1b", "interleaved/4", "zb-h1", "zb-v")

JOBS: Final = (
    Job("H100", "8B", 1, 8, _WHOLE),
    Job("H100", "8B", 2, 4, ("1f1b", "interleaved/4")),
    Job("H100", "70B", 2, 16, ("1f1b", "interleaved/5")),
    Job("H100", "70B", 4, 8, ("1f1b", "interleaved/5")),
    Job("H100", "70B", 8, 4, ("1f1b", "interleaved/5")),
    Job("H100", "70B", 8, 8, ("1f1b", "interleaved/5")),
    Job("H100", "70B", 8, 8, ("1f1b",)),
    Job("H100", "70B", 8, 8, ("zb-h1",)),
    Job("H100", "405B", 8, 16, ("1f1b", "interleaved/2")),
    Job("H100", "405B", 8, 32, ("1f1b", "interleaved/4")),
    Job("H100", "405B", 8, 16, ("1f1b", "interleaved/2"), 4),
    Job("A100", "8B", 1, 8, _WHOLE),
    Job("A100", "8B", 2, 4, ("1f1b", "interleaved/4")),
    Job("A100", "70B", 4, 8, ("1f1b", "interleaved/5")),
    Job("A100", "70B", 8, 8, ("1f1b", "interleaved/5")),
)


class Losses(NamedTuple):
    """Shares of the time of an iteration.

    Attributes:
        idle: in which a rank runs no pass, on average.
        vocabulary: that collectives of the vocabulary take, and what passes beside them lose.
        network: saved if machines were connected as GPUs of a machine are.
        tensor: saved if collectives of tensor parallelism took no time.
        products: saved if all products ran at the speed of large ones.
    """

    idle: float
    vocabulary: float
    network: float
    tensor: float
    products: float


class Cell(NamedTuple):
    """The fastest plan with a treatment of the vocabulary.

    Attributes:
        schedule: its name, with the chunks of a rank.
        recomputed: whether all layers are computed again, as nothing fits otherwise.
        seconds: of an iteration.
        memory: GiB of the fullest rank.
        losses: parts of the time.
    """

    schedule: str
    recomputed: bool
    seconds: float
    memory: float
    losses: Losses

    @property
    def words(self) -> str:
        """Its seconds and schedule."""
        return f"{self.seconds:.2f} ({self.name})"

    @property
    def name(self) -> str:
        """Its schedule; with R if its layers are computed again."""
        return f"{self.schedule}, R" if self.recomputed else self.schedule


Row = dict[str, Cell | None]
"""Cells by treatment; ``None``: no plan fits."""


class _FullSpeed(Rates):
    """Rates at which no product is too small."""

    def _multiplied(self, launch: Launch) -> float:
        if launch.product is None:
            return super()._multiplied(launch)
        return launch.flops / (self.product_share * self.peak_flops)


class _TensorFree(Cluster):
    """A cluster on which collectives of tensor parallelism take no time."""

    def exchange(self, axis: SpreadAxis, kind: CollectiveKind, ranks: int, size: float) -> float:
        return 0.0 if axis == "tensor" else super().exchange(axis, kind, ranks, size)

    def crowding(self, axis: SpreadAxis, ranks: int) -> float:
        return 0.0 if axis == "tensor" else super().crowding(axis, ranks)


def losses(found: RunForecast) -> Losses:
    """Return the losses of a plan, each by itself; all at once may save more, or less."""
    config, run_plan = found.config, found.run_plan
    cluster = cluster_of(config.parallel, found.gpu)
    near = Links(cluster.links.link, cluster.links.link)
    fast = _FullSpeed(**vars(cluster.rates))
    seconds = found.outcome.seconds

    def lost(other: Cluster, *, free: bool = False) -> float:
        less = forecast_run(config, run_plan, found.gpu, other, free=free)
        return 1 - less.outcome.seconds / seconds

    return Losses(
        found.outcome.idle,
        lost(cluster, free=True),
        lost(replace(cluster, links=near)),
        lost(_TensorFree(**vars(cluster))),
        lost(replace(cluster, rates=fast)),
    )


def cell(job: Job, treatment: str, vocabulary: int) -> Cell | None:
    """Return the fastest plan that fits; layers are computed again only if no other plan fits.

    Args:
        job: model, GPUs and layout.
        treatment: of the vocabulary.
        vocabulary: its entries.
    """
    for more in ("", EVERY_LAYER):
        best: tuple[str, RunForecast] | None = None
        for schedule in job.schedules:
            config = job.config(treatment, vocabulary, schedule, more)
            [candidate] = asked(config)
            if not candidate.can_fit:
                continue
            found = forecast_run(config, candidate.run_plan, GPUS[job.gpu])
            if found.fits and (not best or found.outcome.seconds < best[1].outcome.seconds):
                best = schedule, found
        if best:
            schedule, found = best
            seconds, peak = found.outcome.seconds, max(found.outcome.peak) / GIB
            return Cell(schedule, bool(more), seconds, peak, losses(found))
    return None


def row_of(asked_for: tuple[Job, str]) -> Row:
    """Return the row of a job with a vocabulary, given by name."""
    job, name = asked_for
    found: Row = {}
    for treatment in TREATMENTS:
        if treatment == "redis" and moves_nothing(job, VOCABULARIES[name]):
            found[treatment] = found["none"]
        else:
            found[treatment] = cell(job, treatment, VOCABULARIES[name])
    return found


def moves_nothing(job: Job, vocabulary: int) -> bool:
    """Whether every stage has the same layers with redis as without, in all schedules."""
    return all(
        asked(job.config("none", vocabulary, schedule, more))[0].layers
        == asked(job.config("redis", vocabulary, schedule, more))[0].layers
        for schedule in job.schedules
        for more in ("", EVERY_LAYER)
    )
