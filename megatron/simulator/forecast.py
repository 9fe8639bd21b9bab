"""Forecast the time of an iteration on a device, and the peak memory of every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Times(Protocol):
    """The times of a simulated iteration: a timeline, or the clocks of its ranks."""

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""

    @property
    def end(self) -> float:
        """End of the iteration."""

    def idle(self) -> float:
        """Return the share of the time from 0 to ``end`` in which ranks run no pass."""


@dataclass(frozen=True)
class Forecast:
    """The forecast time and memory of an iteration.

    Attributes:
        schedule: seconds of the schedule.
        step: seconds of the optimizer's step on the slowest rank.
        idle: share of the schedule in which a rank waits, averaged over the ranks.
        mfu: model FLOPs as a share of the peak of all devices, in the time of the iteration.
        peak: for every rank, the most bytes that it holds.
        once: seconds of work that is done once in an iteration, such as rounding weights to 8
            bits; ``schedule`` does not include them.
    """

    schedule: float
    step: float
    idle: float
    mfu: float
    peak: Sequence[float]
    once: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of an iteration."""
        return self.schedule + self.once + self.step

    @classmethod
    def of(
        cls,
        times: Times,
        peak: Sequence[float],
        *,
        model_flops: float,
        peak_flops: float,
        step: float = 0.0,
        once: float = 0.0,
    ) -> "Forecast":
        """Return the forecast of a simulated iteration; the units are those of the attributes.

        ``model_flops`` are the useful FLOPs of all ranks of the pipeline together, and
        ``peak_flops`` the FLOP/s of one rank by its data sheet.
        """
        seconds = times.end + once + step
        mfu = model_flops / (times.ranks * peak_flops * seconds)
        return cls(times.end, step, times.idle(), mfu, peak, once)
