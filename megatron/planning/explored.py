"""The ways that a search has looked at as a folder, which the explorer shows as points."""

from pathlib import Path
from typing import Any

from megatron.planning.answer import Answer, Seen
from megatron.planning.asked.question import Question
from megatron.planning.plan_json import job_json, way_json
from megatron.simulator.simulate import Timeline
from megatron.simulator.ways_folder import save_ways


def write_ways(answer: Answer, folder: Path) -> None:
    """Write all ways that a search has looked at into a folder.

    The plan of all microbatches may be too large for a page. So the timeline of a way is of the
    plan of few microbatches by which the way was estimated; ``timeline_microbatches`` tells their
    number.

    Raises:
        OSError: a file cannot be written; the message names it.
    """
    question = answer.question
    ways = [(_figures(question, own), own.timeline) for own in answer.seen]
    save_ways(folder, job_json(question), ways)


def _figures(question: Question, seen: Seen) -> dict[str, Any]:
    timeline = seen.timeline
    return {
        "role": seen.role,
        "fits": seen.fits,
        **way_json(question, seen.proposal),
        "timeline_microbatches": None if timeline is None else _microbatches(timeline),
    }


def _microbatches(timeline: Timeline) -> int:
    """Return the number of microbatches that pass through a timeline."""
    return 1 + max(span.microbatch for span in timeline.spans if span.lane == "compute")
