"""What a run records: one frozen record for each event, whatever becomes of it.

docs/metrics.md defines every value. ``None`` stands for a value that this run does not know.
"""

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from megatron.config.run_config import RunConfig


@dataclass(frozen=True)
class Started:
    """A process group that has begun or gone on with a run.

    Attributes:
        time: of the record.
        iteration: iterations that earlier processes have trained.
        consumed_samples: training samples that they have used.
        train_iters: iterations of the whole job.
        world_size: ranks of the job.
        parameters: of the whole model; each counts once.
        flops: model FLOPs of an iteration, over all ranks.
        peak_tflops: peak of one rank in TFLOP/s, for the MFU.
        config: the configuration of the run.
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


@dataclass(frozen=True)
class Step:
    """One iteration that has become final.

    Attributes:
        iteration: its number, from 1.
        train_iters: iterations of the whole job.
        consumed_samples: training samples so far.
        seconds: time of this iteration.
        learning_rate: rate of the next step, as in Megatron.
        global_batch_size: samples of an iteration.
        lm_loss: of this iteration, nats per token.
        grad_norm: global norm, before clipping.
        params_norm: global norm of the weights after its step.
        num_zeros: zeros of the gradient.
        loss_scale: of the next iteration, as in Megatron.
        mtp_losses: of every further token that is predicted, nats per token.
    """

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


@dataclass(frozen=True)
class RankFigures:
    """Memory and idle time of one rank.

    Attributes:
        rank: of the job.
        peak_memory: most bytes since the start: of tensors on a GPU, of the process on a CPU.
        reserved_memory: most bytes that PyTorch's allocator has reserved on a GPU.
        idle: share of the time of the passes of one iteration in which the rank ran none.
    """

    rank: int
    peak_memory: int
    reserved_memory: int | None = None
    idle: float | None = None


@dataclass(frozen=True)
class Interval:
    """The iterations since the last record of this kind: the values of a training line, and more.

    Attributes:
        time: of the record.
        iteration: number of the last finished iteration, from 1.
        train_iters: iterations of the whole job.
        consumed_samples: training samples so far.
        consumed_tokens: the tokens in them.
        seconds_per_iteration: mean over the interval.
        tflops_per_rank: model TFLOP/s of one rank.
        mfu: model FLOPs utilisation: ``tflops_per_rank`` as a share of the rank's peak.
        tokens_per_second: of all ranks.
        learning_rate: rate of the next step, as in Megatron.
        global_batch_size: samples of an iteration.
        lm_loss: mean over the interval, nats per token.
        grad_norm: global norm of the last iteration, before clipping.
        params_norm: global norm of the weights after the last step.
        num_zeros: zeros of the last iteration's gradient.
        skipped: iterations that took no step.
        nans: those of them whose loss or gradient was not finite.
        seconds_in_saves: time since the start in which training stood still for a save.
        seconds_in_evaluations: time since the start in which training stood still for one.
        ranks: memory and idle time by rank; empty if nobody asked for them.
        loss_scale: of the next iteration, as in Megatron.
        mtp_losses: of every further token that is predicted, as ``lm_loss``.
    """

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
    ranks: tuple[RankFigures, ...] = ()
    loss_scale: float | None = None
    mtp_losses: tuple[float, ...] = ()

    @property
    def idle(self) -> tuple[float, ...]:
        """The ranks' idle shares; empty if they are not known."""
        return tuple(rank.idle for rank in self.ranks if rank.idle is not None)


@dataclass(frozen=True)
class Evaluation:
    """The loss on data that are only evaluated.

    Attributes:
        time: of the record.
        iteration: training iterations done.
        consumed_samples: training samples so far.
        dataset: what was evaluated: validation or test; the first of several validation sets is
            validation-0, as in Megatron.
        at_end: whether it was the evaluation at the end of the run.
        lm_loss: mean over the evaluation's batches, nats per token.
        perplexity: of that loss.
        seconds: that it took.
    """

    time: datetime
    iteration: int
    consumed_samples: int
    dataset: str
    at_end: bool
    lm_loss: float
    perplexity: float
    seconds: float


@dataclass(frozen=True)
class Ended:
    """The end of the processes, in good order.

    Attributes:
        time: of the record.
        iteration: training iterations done.
        consumed_samples: training samples so far.
        consumed_tokens: the tokens in them.
        seconds_in_saves: time since the start in which training stood still for a save.
        seconds_in_evaluations: time since the start in which training stood still for one.
    """

    time: datetime
    iteration: int
    consumed_samples: int
    consumed_tokens: int
    seconds_in_saves: float
    seconds_in_evaluations: float


SaveEvent = Literal["Saved checkpoint", "Saving async checkpoint", "Saved async checkpoint"]
"""What has happened to a checkpoint, in Megatron-LM's words."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that has been begun or written.

    Attributes:
        time: of the record.
        event: which of the two.
        iteration: training iterations in it.
        consumed_samples: training samples that they have used.
    """

    time: datetime
    event: SaveEvent
    iteration: int
    consumed_samples: int


Record = Started | Step | Interval | Evaluation | Ended | Saved


def perplexity(lm_loss: float) -> float:
    """Return the perplexity of a loss in nats, computed from at most 20 of them, as in Megatron."""
    return math.exp(min(20.0, lm_loss))


def now() -> datetime:
    """Return the time for a record."""
    return datetime.now().astimezone()
