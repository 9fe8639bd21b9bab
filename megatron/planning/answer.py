"""The answer to "which line for my GPUs?": ways to run a job, with their figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from megatron.model.flops import iteration_flops
from megatron.planning.asked.question import Question
from megatron.planning.forecast_run import RunForecast
from megatron.planning.where_time_goes import Reason, where_time_goes
from megatron.run.run_config import RunConfig
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.simulate import Timeline
from megatron.simulator.ways_folder import Role

_DAY: Final = 24 * 3600


@dataclass(frozen=True)
class Proposal:
    """A way to run the job that was asked about.

    Attributes:
        words: the flags of layout and plan, with their values, behind ``Question.words``.
        config: the run that they make.
        seconds: seconds of an iteration, planned or estimated.
        peak: bytes of the fullest rank.
        room: bytes that the job may use on that rank.
        in_flight: the most microbatches that a rank holds; ``None``: not planned.
        forecast: the forecast of its plan; ``None``: it is not kept.
        planned: whether seconds and bytes are of its whole plan; otherwise they are estimates.
    """

    words: tuple[str, ...]
    config: RunConfig = field(repr=False)
    seconds: float
    peak: float
    room: float
    in_flight: float | None = None
    forecast: RunForecast | None = field(default=None, repr=False)
    planned: bool = False

    @property
    def left(self) -> float:
        """Bytes of the fullest rank that are left; below 0: bytes that it lacks."""
        return self.room - self.peak

    @property
    def splits_vocabulary(self) -> bool:
        """Whether ranks of the pipeline share the vocabulary layers."""
        parallel = self.config.parallel
        return parallel.pipeline.size > 1 and TREATMENTS[parallel.vocab_parallel].is_sharded

    @cached_property
    def spent(self) -> Mapping[Reason, float]:
        """Seconds by reason; empty: there is no plan."""
        return {} if self.forecast is None else where_time_goes(self.forecast)

    def tokens_per_second(self, question: Question) -> float:
        """Tokens of the whole job in a second."""
        return question.batch_tokens / self.seconds

    def days(self, question: Question) -> float | None:
        """Days of the whole training, without pauses; ``None``: its tokens are not told."""
        if question.tokens is None:
            return None
        return question.tokens / self.tokens_per_second(question) / _DAY

    def mfu(self, question: Question) -> float:
        """FLOPs of the model as a share of the peak of all GPUs."""
        flops = iteration_flops(self.config.model, question.global_batch_size)
        peak = 1e12 * question.gpus.gpu.peak_tflops * question.gpus.count
        return flops / (peak * self.seconds)

    @property
    def sizes(self) -> dict[str, int]:
        """The ranks of its layout by the letter that stands for them; e only of a mixture."""
        parallel, replicas = self.config.parallel, self.config.train.replicas
        found = {"t": parallel.tensor.size, "p": parallel.pipeline.size}
        found |= {"c": parallel.context.size, "d": replicas}
        return found | (
            {"e": parallel.experts.expert_model_parallel_size}
            if self.config.model.experts.num_experts
            else {}
        )


@dataclass(frozen=True)
class Obstacle:
    """A faster way that does not fit, and settings that would save memory.

    Attributes:
        proposal: the way.
        remedies: settings that would save memory, in words, each with what it saves or costs.
    """

    proposal: Proposal
    remedies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """A way that the search has looked at.

    Attributes:
        proposal: the way.
        fits: whether every rank and every host has enough memory.
        role: its part in the answer; empty: the answer does not name it.
        timeline: timeline of the plan of few microbatches by which it was estimated; ``None``: not
            kept.
    """

    proposal: Proposal
    fits: bool
    role: Role = ""
    timeline: Timeline | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Answer:
    """The answer of a search.

    Attributes:
        question: the question.
        taken: the way that is proposed; it is planned in full and fits.
        unsplit: the fastest way that fits without a split vocabulary; ``None``: none fits.
        runners_up: the next best ways, the fastest first.
        obstacles: faster ways that do not fit, the fastest first.
        effort: a line on what the search has looked at, and how it ended.
        seen: all ways that the search has looked at, the fastest first.
    """

    question: Question
    taken: Proposal
    unsplit: Proposal | None = None
    runners_up: Sequence[Proposal] = ()
    obstacles: Sequence[Obstacle] = ()
    effort: str = ""
    seen: Sequence[Seen] = ()
