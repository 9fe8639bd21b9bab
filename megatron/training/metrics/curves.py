"""The points that a record adds to curves; curves that Megatron-LM also draws have its names.

Megatron draws some curves twice, over the iterations and over the samples. It has the same name for
the losses of validation and test; here the test set has its own name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from megatron.run.records import RecordSettings
from megatron.training.metrics.records import Evaluation, Interval, Record, Step


class Point(NamedTuple):
    """A point of a curve.

    With ``over_samples`` it is drawn over the iterations and over the samples.
    """

    curve: str
    value: float
    over_samples: bool = False


class Bars(NamedTuple):
    """A bar chart for one iteration: the height of bar 0, 1 and so on."""

    chart: str
    heights: tuple[int, ...]


@dataclass(frozen=True)
class Curves:
    """Chooses the points that are drawn."""

    config: RecordSettings
    world_size: int

    @property
    def wants_ranks(self) -> bool:
        """Whether a curve needs memory or idle time by rank."""
        return self.config.log_timers_to_tensorboard or self.config.log_memory_to_tensorboard

    def points(self, record: Record) -> Iterator[Point]:
        """Yield the points of a record."""
        if isinstance(record, Step):
            if self._is_drawn(record):
                yield from self._of_step(record)
        elif isinstance(record, Interval):
            if self.config.log_timers_to_tensorboard:
                yield from _times(record)
            if self.config.log_memory_to_tensorboard:
                yield from _memory(record)
        elif isinstance(record, Evaluation):
            curve = f"lm loss {record.dataset}"
            yield Point(curve, record.lm_loss, True)
            if self.config.log_validation_ppl_to_tensorboard:
                yield Point(f"{curve} ppl", record.perplexity, True)

    def bars(self, record: Record) -> Iterator[Bars]:
        """Yield a chart for every layer with experts, with a bar for the load of every expert.

        A curve for every expert would be 14,848 curves for DeepSeek-V3.
        """
        if isinstance(record, Step) and self._is_drawn(record):
            for own in record.layers:
                if own.expert_loads:
                    yield Bars(f"moe/expert-load_layer_{own.layer}", own.expert_loads)

    def _is_drawn(self, record: Step) -> bool:
        return record.iteration % self.config.tensorboard_log_interval == 0

    def _of_step(self, record: Step) -> Iterator[Point]:
        yield Point("learning-rate", record.learning_rate, True)
        yield Point("batch-size", record.global_batch_size, True)
        yield Point("lm loss", record.lm_loss, True)
        for depth, loss in enumerate(record.mtp_losses, 1):
            yield Point(f"mtp_{depth} loss", loss, True)
        yield from _of_layers(record)
        if self.config.log_world_size_to_tensorboard:
            yield Point("world-size", self.world_size, True)
        if record.loss_scale is not None and not self.config.no_log_loss_scale_to_tensorboard:
            yield Point("loss-scale", record.loss_scale, True)
        yield Point("grad-norm", record.grad_norm, True)
        if record.num_zeros is not None:
            yield Point("num-zeros", record.num_zeros, True)
        if record.params_norm is not None:
            yield Point("params-norm", record.params_norm, True)


def _of_layers(record: Step) -> Iterator[Point]:
    for name, loss in record.layer_losses.items():
        yield Point(name, loss)
    if record.expert_imbalance is not None:
        yield Point("expert-imbalance", record.expert_imbalance)
    for own in record.layers:
        for name, loss in own.losses.items():
            yield Point(f"moe/{name}_layer_{own.layer}", loss)
        if own.expert_imbalance is not None:
            yield Point(f"moe/expert-imbalance_layer_{own.layer}", own.expert_imbalance)


def _times(record: Interval) -> Iterator[Point]:
    yield Point("iteration-time", record.seconds_per_iteration)
    yield Point("throughput", record.tflops_per_rank)
    yield Point("mfu", record.mfu)
    yield Point("tokens-per-second", record.tokens_per_second)
    yield Point("seconds-in-saves", record.seconds_in_saves)
    yield Point("seconds-in-evaluations", record.seconds_in_evaluations)
    if record.idle:
        yield Point("idle", fmean(record.idle))
        yield Point("idle-max", max(record.idle))


def _memory(record: Interval) -> Iterator[Point]:
    """Yield the memory of the rank that holds the most: this rank decides whether a run fits."""
    if not record.ranks:
        return
    reserved = [r.reserved_memory for r in record.ranks if r.reserved_memory is not None]
    held = max(rank.peak_memory for rank in record.ranks)
    yield Point("mem-max-allocated-bytes" if reserved else "mem-max-resident-bytes", held)
    if reserved:
        yield Point("mem-max-reserved-bytes", max(reserved))
