"""Whether the host of a GPU can launch kernels as fast as the GPU runs them.

A dry run knows the time of a kernel on the GPU. The time in which a host launches a kernel depends
on its CPU, which a dry run does not know. So the report says when a usual CPU may be too slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron.simulator.costs.rank_memory import RankMemory
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
        launches: kernels that its host launches. Libraries add further ones, which do not count.
        seconds: the time of its passes, without updates of parameters.
    """

    launches: int
    seconds: float

    @property
    def each(self) -> float:
        """Mean seconds of the GPU for a launch."""
        return self.seconds / max(1, self.launches)

    def in_words(self, *, could_capture: bool) -> str | None:
        """Return the line of a report; ``None`` if a launch keeps the GPU busy for long enough.

        Args:
            could_capture: whether the passes of the run could be captured as graphs.
        """
        if self.each >= SHORT or not self.launches:
            return None
        graphs = ", and --cuda-graph-impl local" if could_capture else ""
        return (
            f"host: {self.launches:,} launches in {TIME.write(self.seconds)}, "
            f"{1e6 * self.each:.0f} us each: the GPU waits for a host that takes longer for a "
            f"launch (one measured host: {1e6 * MEASURED_PACE:.0f} us), and the iteration takes "
            f"longer than predicted; larger microbatches help{graphs}"
        )


def launch_pace(
    timeline: Timeline, memories: Sequence[RankMemory], microbatches: int
) -> LaunchPace:
    """Return the pace of the rank whose passes take the longest.

    Args:
        timeline: of the schedule, in seconds.
        memories: of every rank, with the counts of its passes for one microbatch.
        microbatches: of the schedule.
    """
    busy = [
        sum(span.length for span in timeline.compute(rank) if span.kind != "U")
        for rank in range(timeline.ranks)
    ]
    rank = max(range(len(busy)), key=busy.__getitem__)
    count = memories[rank].count
    owns = [*count.passes.values(), *count.begun.values(), *count.ended.values()]
    launches = sum(times * len([*work.launches]) for own in owns for work, times in own.parts)
    return LaunchPace(microbatches * launches, busy[rank])
