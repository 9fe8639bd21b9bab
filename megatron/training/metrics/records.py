"""The records of a run, a frozen dataclass for each kind of event, and the sinks that take them.

docs/metrics.md defines every value. ``None`` stands for a value that this run does not know.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from megatron.run.run_config import RunConfig


@dataclass(frozen=True)
class LayerFigures:
    """One layer in an iteration.

    Attributes:
        layer: index in the whole model.
        losses: of its own, by name.
        expert_imbalance: tokens of its busiest expert divided by the mean over its experts.
        busiest_expert: this expert.
        expert_loads: how many tokens have chosen each of its experts.
    """

    layer: int
    losses: Mapping[str, float]
    expert_imbalance: float | None = None
    busiest_expert: int | None = None
    expert_loads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Started:
    """The start of the processes, which begin a run or go on with it.

    ``planned_idle`` is the idle share that the plan has by the costs for which it was made.
    """

    time: datetime
    iteration: int
    consumed_samples: int
    train_iters: int
    world_size: int
    parameters: int
    flops: int
    peak_tflops: float
    config: RunConfig
    planned_idle: float | None = None


@dataclass(frozen=True)
class Step:
    """One iteration that has become final; its values mean the same as in ``Interval``."""

    iteration: int
    train_iters: int
    consumed_samples: int
    seconds: float
    learning_rate: float
    global_batch_size: int
    lm_loss: float
    grad_norm: float
    params_norm: float | None = None
    num_zeros: int | None = None
    loss_scale: float | None = None
    mtp_losses: tuple[float, ...] = ()
    layer_losses: Mapping[str, float] = field(default_factory=dict)
    expert_imbalance: float | None = None
    busiest_layer: int | None = None
    busiest_expert: int | None = None
    layers: tuple[LayerFigures, ...] = ()


@dataclass(frozen=True)
class RankFigures:
    """Memory and times of one rank.

    Attributes:
        idle_by_reason: the parts of ``idle``.
        computing: seconds of its passes by kind, without waits within them; empty: not known.
        slowness: the computing time over the usual one.
    """

    rank: int
    peak_memory: int
    reserved_memory: int | None = None
    idle: float | None = None
    idle_by_reason: Mapping[str, float] = field(default_factory=dict)
    computing: Mapping[str, float] = field(default_factory=dict)
    slowness: float | None = None


@dataclass(frozen=True)
class Slowest:
    """The slowest rank in an iteration, by its computing time; see ``metrics/stragglers.py``.

    Attributes:
        rank: in the job.
        pipeline: its coordinate pp.
        tensor: its coordinate tp.
        context: its coordinate cp.
        data: its coordinate dp.
        slowness: ``seconds`` over ``usual``.
        seconds: its computing time.
        usual: computing time that its work takes on the median rank.
        passes: kind of passes in which it loses most.
        passes_slowness: time of these passes over their usual time.
        median: computing time of the median of all ranks.
        fastest: the shortest computing time of a rank.
    """

    rank: int
    pipeline: int
    tensor: int
    context: int
    data: int
    slowness: float
    seconds: float
    usual: float
    passes: str
    passes_slowness: float
    median: float
    fastest: float


@dataclass(frozen=True)
class Interval:
    """The iterations since the last interval: the values of a training line, and more."""

    time: datetime
    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    seconds_per_iteration: float
    tflops_per_rank: float
    mfu: float
    tokens_per_second: float
    learning_rate: float
    global_batch_size: int
    lm_loss: float
    grad_norm: float
    params_norm: float | None = None
    num_zeros: int | None = None
    skipped: int = 0
    nans: int = 0
    seconds_in_saves: float = 0.0
    seconds_in_evaluations: float = 0.0
    slowest: Slowest | None = None
    ranks: tuple[RankFigures, ...] = ()
    loss_scale: float | None = None
    mtp_losses: tuple[float, ...] = ()
    layer_losses: Mapping[str, float] = field(default_factory=dict)
    expert_imbalance: float | None = None
    busiest_layer: int | None = None
    busiest_expert: int | None = None
    layers: tuple[LayerFigures, ...] = ()

    @property
    def idle(self) -> tuple[float, ...]:
        """The ranks' idle shares; empty if they are not known."""
        return tuple(rank.idle for rank in self.ranks if rank.idle is not None)


@dataclass(frozen=True)
class Evaluation:
    """The loss on data that are only evaluated.

    Attributes:
        first_batch: number in its set, from 1, of the first batch that was read.
        batches: that were read.
    """

    time: datetime
    iteration: int
    consumed_samples: int
    dataset: str
    at_end: bool
    lm_loss: float
    perplexity: float
    seconds: float
    first_batch: int = 1
    batches: int = 1


@dataclass(frozen=True)
class GeneratedText:
    """A text that the model has written.

    Attributes:
        prompt: from which it goes on; empty: it begins behind the end of a document.
        text: behind the prompt, without the token that ends it.
        tokens: of ``text``; the last one may be the end of a document.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Generated:
    """Texts that the model has written between two iterations."""

    time: datetime
    iteration: int
    consumed_samples: int
    seconds: float
    texts: tuple[GeneratedText, ...]


@dataclass(frozen=True)
class Ended:
    """The end of the processes, in good order."""

    time: datetime
    iteration: int
    consumed_samples: int
    consumed_tokens: int
    seconds_in_saves: float
    seconds_in_evaluations: float


SaveEvent = Literal["Saved checkpoint", "Saving async checkpoint", "Saved async checkpoint"]
"""Event of a checkpoint, in Megatron-LM's words."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that has been begun or written."""

    time: datetime
    event: SaveEvent
    iteration: int
    consumed_samples: int


Record = Started | Step | Interval | Evaluation | Generated | Ended | Saved


class Sink:
    """Takes records, and writes or shows the kinds of records that it knows.

    Attributes:
        name: the flag that asks for the sink, with its value.
        wants_ranks: whether the sink uses memory and idle time by rank, which all ranks must
            gather.
    """

    name: str
    wants_ranks = False

    def write(self, record: Record) -> None:
        """Take a record.

        Raises:
            OSError: the record could not be written.
        """
        raise NotImplementedError

    def close(self, failed: bool) -> None:
        """Write the rest; ``failed``: the run ends by an error, whose message must stay visible.

        Raises:
            OSError: the rest could not be written.
        """


def perplexity(lm_loss: float) -> float:
    """Return the perplexity of a loss in nats; losses above 20 count as 20, as in Megatron."""
    return math.exp(min(20.0, lm_loss))


def now() -> datetime:
    """Return the time for a record."""
    return datetime.now().astimezone()
