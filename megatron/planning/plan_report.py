"""The answer to "which line for my GPUs?", in words and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.run_config import RunConfig
from megatron.planning.asked.question import Question
from megatron.planning.forecast_run import RunForecast


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
        forecast: the forecast of its plan; ``None``: seconds and bytes are estimates.
    """

    words: tuple[str, ...]
    config: RunConfig = field(repr=False)
    seconds: float
    peak: float
    room: float
    in_flight: float | None = None
    forecast: RunForecast | None = field(default=None, repr=False)

    @property
    def left(self) -> float:
        """Bytes of the fullest rank that are left; below 0: bytes that it lacks."""
        return self.room - self.peak


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
class Answer:
    """The answer of a search.

    Attributes:
        question: the question.
        taken: the way that is proposed; it is planned in full and fits.
        unsplit: the fastest way that fits without a split vocabulary; ``None``: none fits.
        runners_up: the next best ways, the fastest first.
        obstacles: faster ways that do not fit, the fastest first.
        effort: a line on what the search has looked at, and how it ended.
    """

    question: Question
    taken: Proposal
    unsplit: Proposal | None = None
    runners_up: Sequence[Proposal] = ()
    obstacles: Sequence[Obstacle] = ()
    effort: str = ""


def report(answer: Answer) -> Iterator[str]:
    """Yield the paragraphs of an answer."""
    raise NotImplementedError


def as_json(answer: Answer) -> dict[str, Any]:
    """Return an answer as one JSON object; its fields are in docs/running.md."""
    raise NotImplementedError
