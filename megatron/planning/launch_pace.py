"""Whether the host of a GPU can launch kernels as fast as the GPU runs them.

A pass that is captured as a graph is one launch, beside the copies into and out of its memory. A
dry run knows the time of a kernel on the GPU. The time in which a host launches a kernel depends
on its CPU, which a dry run does not know. So the report says when a usual CPU may be too slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron.simulator.costs.count import RankCount
from megatron.simulator.simulate import Timeline
from megatron.simulator.units import TIME

MEASURED_PACE: Final = 77e-6
"""Seconds in which the host of one machine issued a counted launch, while its GPU waited for it.

The schedule of *GPT 2048, 32k* (docs/predictions.md) took 102.8 ms on an H200 for 1,340 counted
launches, and the kernels of the whole iteration took 52.8 ms (PyTorch 2.11, 2026-11-26). This host
took 8.8 us for ``torch.add``, and 35 to 70 us for a Triton program."""

SHORT: Final = 100e-6
"""Seconds of the GPU for a launch, below which the report names the host.

Predicted seconds of single GPUs were 1.26 times the measured seconds in the median of the models
that no host slowed. So the measured host needs as long as a launch of 97 us by prediction."""


@dataclass(frozen=True)
class LaunchPace:
    """The launches of a rank in the schedule of an iteration.

    Attributes:
        launches: kernels and graphs that its host launches. Libraries add further ones, which do
            not count.
        seconds: the time of its passes, without updates of parameters.
        kernels: kernels that are launched, also those within graphs.
    """

    launches: int
    seconds: float
    kernels: int = 0

    @property
    def each(self) -> float:
        """Mean seconds of the GPU for a launch."""
        return self.seconds / max(1, self.launches)

    @property
    def is_short(self) -> bool:
        """Whether a launch keeps the GPU busy for so short that a usual host may be slower."""
        return self.launches > 0 and self.each < SHORT

    def in_words(self, replayed: "LaunchPace | None" = None) -> str | None:
        """Return the line of a report; ``None`` if a launch keeps the GPU busy for long enough.

        Args:
            replayed: the pace of the same run with graphs of passes; ``None``: it can have none.
        """
        if not self.is_short:
            return None
        graphs = "" if replayed is None else f", and --cuda-graph-impl local{self._gain(replayed)}"
        return (
            f"host: {self.launches:,} launches in {TIME.write(self.seconds)}, "
            f"{1e6 * self.each:.0f} us each: the GPU waits for a host that takes longer for a "
            f"launch (one measured host: {1e6 * MEASURED_PACE:.0f} us), and the iteration takes "
            f"longer than predicted; larger microbatches help{graphs}"
        )

    def of_graphs_in_words(self) -> str:
        """Return the line of a report on a run whose passes are captured."""
        return (
            f"host: {self.launches:,} launches in {TIME.write(self.seconds)} for "
            f"{self.kernels:,} kernels, because passes are replayed as graphs"
        )

    @property
    def _on_measured_host(self) -> float:
        """Seconds of the schedule on the measured host, which is late or is not."""
        return max(self.seconds, self.launches * MEASURED_PACE)

    def _gain(self, replayed: "LaunchPace") -> str:
        """Return the launches with graphs, and the time that the measured host would save."""
        saved = 1 - replayed._on_measured_host / self._on_measured_host
        less = f"; on that host {saved:.0%} less time" if saved >= 0.01 else ""
        return f" ({replayed.launches:,} launches{less})"


def launch_pace(timeline: Timeline, counts: Sequence[RankCount], microbatches: int) -> LaunchPace:
    """Return the pace of the rank whose passes take the longest.

    Args:
        timeline: of the schedule, in seconds.
        counts: of every rank, for one microbatch.
        microbatches: of the schedule.
    """
    busy = [
        sum(span.length for span in timeline.compute(rank) if span.kind != "U")
        for rank in range(timeline.ranks)
    ]
    rank = max(range(len(busy)), key=busy.__getitem__)
    count = counts[rank]
    owns = [*count.passes.values(), *count.begun.values(), *count.ended.values()]
    return LaunchPace(
        microbatches * sum(own.launched for own in owns),
        busy[rank],
        microbatches * sum(own.kernels for own in owns),
    )
