"""The dimensions of a run that ``auto`` leaves to its plan, and all ways that the run could go.

To add a dimension, declare it in the file of its topic, and list it in ``DIMENSIONS``.
"""

from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple

from megatron.flags.groups import Flags
from megatron.flags.rules import refuses
from megatron.run.context_exchange import EXCHANGE
from megatron.run.edit import Choice
from megatron.run.offload import HOST
from megatron.run.recompute import RECOMPUTATION
from megatron.run.schedule import VOCABULARY, given_flags
from megatron.run.slices import SLICES
from megatron.schedules.settings import PlanSettings

DIMENSIONS: Final = (VOCABULARY, RECOMPUTATION, HOST, SLICES, EXCHANGE)
"""All dimensions. Where time is short, a run is first compared with changes in the earlier ones."""


class Way(NamedTuple):
    """One choice in every dimension that flags leave open.

    Attributes:
        edits: the edits that ask for these choices.
        words: the words of these choices, in the order of ``DIMENSIONS``.
        changes: number of dimensions that FLOPs alone cannot compare, and in which this is not the
            first choice.
    """

    edits: Choice
    words: tuple[str, ...]
    changes: int


def ways(flags: Flags) -> list[Way]:
    """Return all combinations of choices, first the combinations with the fewest changes.

    Among combinations with equally many changes, the combinations that change earlier dimensions
    come first. A change is combined with every choice in the dimensions that FLOPs compare, and
    only then the next change follows. So if time is short, all treatments of the vocabulary are
    looked at about equally often. Rules may refuse some combinations.

    If no dimension is open, there is none.
    """
    opened = [own for own in DIMENSIONS if own.is_open(flags)]
    found = list[tuple[tuple[int, ...], Way]]()
    for combined in product(*(enumerate(own.choices(flags)) for own in opened)):
        judged = list(zip(combined, opened, strict=True))
        changed = [number for (number, _), own in judged if not own.by_flops]
        compared = [number for (number, _), own in judged if own.by_flops]
        way = Way(
            tuple(edit for (_, choice), _ in judged for edit in choice),
            tuple(own.words(choice) for (_, choice), own in judged),
            sum(number > 0 for number in changed),
        )
        found.append(((way.changes, *reversed(changed), *compared), way))
    return [way for _, way in sorted(found, key=lambda ranked: ranked[0]) if opened]


def closed_notes(flags: Flags) -> Iterator[str]:
    """Yield a note for each dimension that is left open, although it has a single choice."""
    for own in DIMENSIONS:
        auto = own.auto
        if auto is None or own.by_flops or not auto.is_open(flags):
            continue
        if len(own.choices(flags)) == 1:
            yield f"{auto.flag} changes nothing: {auto.closed(flags)}"


@refuses
def _belongs_to_one(flags: Flags) -> Iterator[str]:
    """Refuse a file of a plan or of costs, which belongs to one choice in every dimension."""
    for own in DIMENSIONS:
        if own.auto is None or own is VOCABULARY or not own.is_open(flags):
            continue
        for given in given_flags(flags[PlanSettings], "schedule_file", "measured_costs"):
            yield f"{given} belongs to one run, and {own.auto.flag} compares several: name one"
