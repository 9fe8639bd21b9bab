"""The figures of an iteration, each with its only definition.

Commands and reports print these texts; docs/metrics.md has them all in one place.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from megatron.schedules.counted import counted
from megatron.simulator.simulate import Timeline

DEFINITIONS: Final[Mapping[str, str]] = {
    "time": (
        "from the first start on any rank to the last end on any rank; measured, the forward and "
        "backward of all microbatches, without the optimizer's step"
    ),
    "idle": "the share of the time in which a rank runs no pass, averaged over the ranks",
    "in flight": (
        "the most microbatches whose activations one rank holds at once, from their F to their B, "
        "or W where it is a pass of its own"
    ),
    "bubble": (
        "1 - work / span (arXiv 2401.10241). Work is the time that a rank's passes take, averaged "
        "over the ranks. Span is the longest time that one rank takes from its first start to its "
        "last end, so the bubble is never above idle"
    ),
    "floor": (
        "a lower bound of the time, model FLOPs / (p x the rate of a rank). The rate is measured "
        "in one product of the output layer, [n, h] x [h, 128000], with n tokens of a microbatch "
        "and hidden size h. No schedule that multiplies at this rate, and computes attention in "
        "full, is faster"
    ),
    "MFU": "model FLOPs / (p x the best rate of a rank in square products x the time)",
    "simulated": (
        "simulated time / measured time. The plan is simulated with the measured times of its "
        "passes and communications"
    ),
}
"""Name of a figure -> its definition."""


def definitions(*names: str) -> str:
    """Return the definitions of ``names`` as a list in markdown."""
    return "\n".join(f"* **{name}**: {DEFINITIONS[name]}." for name in names)


def headline(timeline: Timeline, in_flight: Sequence[float]) -> str:
    """Return, as text, the main figures of a plan: time, idle share and microbatches in flight."""
    held = counted(max(in_flight), "microbatch in flight")
    return f"time {timeline.end:.4g}, idle {timeline.idle():.1%}, {held}"
