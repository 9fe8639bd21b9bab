"""The options that the blocks of some schedules take: their flags, short names and values."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from megatron.flags.declare import Declaration, Facts
from megatron.flags.groups import declarations
from megatron.flags.ranges import COUNT, Range
from megatron.schedules.catalogue import Traits, takers
from megatron.schedules.counted import counted

T = TypeVar("T")
Fault = Callable[[Any, int], str | None]
"""Returns the fault of a value in a pipeline of so many ranks, as a sentence without its stop."""


class _OfBlock(NamedTuple):
    """The facts about an option of a block that no other flag has.

    Attributes:
        short: its name in messages and in ``megatron.library``.
        unused: why the other schedules have no use for it; {} stands for the schedules that do.
        fault: finds the fault of a value.
    """

    short: str
    unused: str
    fault: Fault


def _block_option(
    default: T,
    help: str,
    range: Range | None = None,
    *,
    short: str,
    unused: str,
    fault: Fault = lambda value, ranks: None,
    **facts: Any,
) -> T:
    """Declare an option of a block; tools also know its flag as ``--short``.

    Args:
        default: its value with which a block is as it would be without the option.
        help: as in ``Facts``.
        range: as in ``Facts``.
        short: as in ``_OfBlock``.
        unused: as in ``_OfBlock``.
        fault: as in ``_OfBlock``, for faults that depend on the pipeline; ``range`` finds others.
        facts: further arguments of ``Facts``.
    """
    own = Facts(help, range, names=(f"--{short}",), **facts)
    of_block = _OfBlock(short, unused, fault)
    return dataclasses.field(default=default, metadata={"facts": own, "of_block": of_block})


def _small_group(size: int, ranks: int) -> str | None:
    if size >= ranks:
        return None
    return (
        f"groups of {counted(size, 'microbatch')} are smaller than the pipeline of "
        f"{counted(ranks, 'rank')}, so rank 0 would wait in every turn for the last rank: take "
        f"{ranks} or more"
    )


@dataclass(frozen=True)
class BlockOptions:
    """Options that only some schedules take.

    An option that a schedule does not take has its default, or the request is refused. A row of the
    catalogue takes the options that ``Schedule.with_options`` has as arguments.
    """

    # fmt: off
    microbatch_group_size_per_virtual_pipeline_stage: int | None = _block_option(None,
        "Microbatches that go through a model chunk before any of them enters the next: at least "
        "as many as there are pipeline ranks. With more, messages from the last rank to the first "
        "have more time, and a rank holds more. With slices, so many slices. For "
        f"{' or '.join(takers('--microbatch-group-size-per-virtual-pipeline-stage'))}.", COUNT,
        metavar="MICROBATCHES", unset="as many as pipeline ranks", short="group",
        unused="only {} has groups whose size can be chosen", fault=_small_group)
    # fmt: on

    @classmethod
    def of(cls, **values: Any) -> "BlockOptions":
        """Return the options with values by their short names.

        Raises:
            TypeError: no option has this short name.
        """
        names = {own.short: own.name for own in _ALL}
        if unknown := values.keys() - names.keys():
            raise TypeError(
                f"no block takes {', '.join(sorted(unknown))}: an option is one of "
                f"{', '.join(names)}"
            )
        return cls(**{names[short]: value for short, value in values.items()})

    @property
    def given(self) -> tuple["GivenOption", ...]:
        """The options that have another value than their default."""
        found = (dataclasses.replace(own, value=getattr(self, own.name)) for own in _ALL)
        return tuple(own for own in found if own.value != own.declared.default)

    @property
    def values(self) -> Mapping[str, Any]:
        """The values of the given options by field, for ``Schedule.made_with``."""
        return {own.name: own.value for own in self.given}

    def taken_by(self, schedule: Traits) -> "BlockOptions":
        """Return the options without those that a schedule does not take."""
        return self._only(lambda own: own.is_taken_by(schedule))

    def sound(self, ranks: int) -> "BlockOptions":
        """Return the options without those that have a fault in a pipeline of so many ranks."""
        return self._only(lambda own: own.fault(ranks) is None)

    def _only(self, keep: "Callable[[GivenOption], bool]") -> "BlockOptions":
        return BlockOptions(**{own.name: own.value for own in self.given if keep(own)})


@dataclass(frozen=True)
class GivenOption:
    """An option of a block with its value.

    Attributes:
        declared: its flag.
        of_block: its other facts.
        value: its value.
    """

    declared: Declaration
    of_block: _OfBlock
    value: Any = None

    def __str__(self) -> str:
        return f"{self.short}={self.value}"

    @property
    def name(self) -> str:
        """The name of its field."""
        return self.declared.name

    @property
    def short(self) -> str:
        """Its short name."""
        return self.of_block.short

    @property
    def written(self) -> str:
        """The flag with its value, as it stands on a command line."""
        return self.declared.shown(self.value)

    @property
    def takers(self) -> str:
        """The schedules that take it, in words."""
        return " or ".join(takers(self.declared.option))

    @property
    def unused(self) -> str:
        """Why the other schedules have no use for it."""
        return self.of_block.unused.format(self.takers)

    def is_taken_by(self, schedule: Traits) -> bool:
        """Return whether a schedule takes it."""
        return self.name in schedule.block_options

    def fault(self, ranks: int) -> str | None:
        """Return its fault in a pipeline of so many ranks; ``None``: it has none."""
        return self.of_block.fault(self.value, ranks)


_FACTS: Final = {own.name: own.metadata["of_block"] for own in dataclasses.fields(BlockOptions)}
_ALL: Final = tuple(GivenOption(own, _FACTS[own.name]) for own in declarations(BlockOptions))
