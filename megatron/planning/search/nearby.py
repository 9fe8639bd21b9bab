"""Runs near a run that does not fit: its line, and the dimensions in which advice searches.

The ranks, the batch and the model stay as they are. The flags of the run that ask for a schedule, a
treatment of the vocabulary or recomputation make way for the flags of the search.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from megatron.flags.declare import option_of
from megatron.flags.groups import Flags, declarations
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.planning.search.dimensions import (
    ASKING_FOR_SCHEDULES,
    EXCHANGE,
    MEMORY,
    MICRO_BATCH,
    RECOMPUTE,
    SCHEDULE,
    SLICES,
    VOCABULARY,
)
from megatron.run.dimension import Dimension
from megatron.run.edit import Choice, left_out
from megatron.run.line import Line
from megatron.run.run_config import RunConfig
from megatron.run.schedule import (
    ACCOUNTS,
    ASKING_FOR_TREATMENTS,
    ENDS,
)
from megatron.schedules.catalogue import OPTION_FLAGS
from megatron.schedules.limits import GIB_FLAG, PENDING_FLAG, PERCENT_FLAG

_EIGHT: Final = tuple(own.option for own in declarations(EightBitSettings))
_NAMING_SCHEDULES: Final = (
    "--enable-zero-bubble",
    "--zero-bubble-v-schedule",
    "--zero-bubble-v-schedule-mem-setup",
)
"""Flags that stand for the name of a schedule."""
_SCHEDULING: Final = (
    *ASKING_FOR_SCHEDULES,
    *_NAMING_SCHEDULES,
    *(option_of(name) for name in (*ENDS, *ACCOUNTS)),
    PENDING_FLAG,
    PERCENT_FLAG,
    GIB_FLAG,
    *OPTION_FLAGS,
    "--recompute-ahead",
    "--measured-costs",
)
_GROWING: Final = ("--rampup-batch-size", "--batch-size-steps", "--step-batch-size-schedule")
"""Flags of growing batches; a run must fit with its largest batch."""


def _without_eight_bits(flags: Flags) -> Sequence[Choice]:
    """Return products in 8 bits, if flags ask for them, and products in 16 bits.

    Products in 8 bits keep tensors of their own.
    """
    given = [option for option in _EIGHT if option in flags.given]
    return [(), tuple(map(left_out, given))] if given else [()]


def _dividing(size: int, flags: Flags) -> Sequence[Choice]:
    """Return the micro batches that divide one of a ``size``, and so all sizes of a batch."""
    return [own for own in MICRO_BATCH.choices(flags) if size % _size(own) == 0]


def _size(choice: Choice) -> int:
    [(_, words)] = choice
    return int(words[0]) if words else 1


EIGHT_BITS: Final = Dimension("8 bits", "factor", _EIGHT, _without_eight_bits)

_DIMENSIONS: Final = tuple(
    own._replace(closing=())  # the user's choice has been tried, and does not fit
    for own in (MICRO_BATCH, EXCHANGE, EIGHT_BITS, MEMORY, SLICES, SCHEDULE, VOCABULARY)
)


@dataclass(frozen=True)
class Nearby:
    """The line from which advice begins.

    Attributes:
        line: the run's line without the flags that make way.
        own: the flags of the run, and its schedule and treatment as flags.
        dimensions: what advice changes.
    """

    line: Line
    own: Mapping[str, tuple[str, ...]] = field(repr=False)
    dimensions: tuple[Dimension, ...] = _DIMENSIONS

    @classmethod
    def of(cls, config: RunConfig) -> "Nearby":
        """Return the line of a run that has a command line."""
        sizes = {
            "--pipeline-model-parallel-size": config.parallel.pipeline.size,
            "--global-batch-size": config.train.global_batch_size,
            "--pipeline-schedule": config.parallel.pipeline_schedule,
            "--vocab-parallel": config.parallel.vocab_parallel,
        }
        own = {**{option: (str(size),) for option, size in sizes.items()}, **config.given}
        own = {option: words for option, words in own.items() if option not in _GROWING}
        again = () if config.train.recomputation.group else RECOMPUTE
        making_way = {*_SCHEDULING, *ASKING_FOR_TREATMENTS, *again}
        given = {option: words for option, words in own.items() if option not in making_way}
        line = Line({**given, "--dry-run": ()}, config.world_size)
        if config.train.rampup is None:
            return cls(line, own)
        dividing = partial(_dividing, config.train.micro_batch_size)
        return cls(
            line, own, (MICRO_BATCH._replace(choices=dividing, closing=()), *_DIMENSIONS[1:])
        )

    def words(self, line: Line) -> str:
        """Return the flags in which a line differs from the run's own."""
        given = line.given
        changed = [
            " ".join((option, *words))
            for option, words in given.items()
            if option != "--dry-run" and self.own.get(option) != words
        ]
        alike = {
            option
            for asked, options in (
                ("--pipeline-schedule", _NAMING_SCHEDULES),
                ("--vocab-parallel", ASKING_FOR_TREATMENTS),
            )
            if self.own[asked] == given.get(asked)
            for option in options
        }
        dropped = [
            option
            for option in self.own
            if option not in given and option not in alike and option != "--dry-run"
        ]
        return " ".join([*changed, *(["without", *dropped] if dropped else [])])
