"""Groups of flags: filled from the words of a command line, and turned into configurations."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron.flags.declare import Declaration

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)

Group = TypeVar("Group")
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Flags:
    """The flags of a command line, by group, as in ``flags[ModelFlags].num_layers``.

    Attributes:
        groups: an instance of every group, by its class.
        world_size: ranks of the job.
        given: the words behind each flag of the command line.
        chosen: flags of the command line that a search has chosen, and not its user. Lines with the
            same flags are equal, whoever has chosen these.
    """

    groups: Mapping[type, Any]
    world_size: int = 1
    given: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    chosen: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

    def __getitem__(self, group: type[Group]) -> Group:
        """Return the flags of a group."""
        flags: Group = self.groups[group]
        return flags

    def asks(self, option: str) -> bool:
        """Return whether the user of the command line has given a flag."""
        return option in self.given and option not in self.chosen

    def replaced(self, *groups: Any) -> "Flags":
        """Return a copy of the flags; each of ``groups`` replaces the group of the same class."""
        return dataclasses.replace(
            self, groups={**self.groups, **{type(group): group for group in groups}}
        )


@dataclasses.dataclass(frozen=True)
class Reading:
    """A command line that was read.

    Attributes:
        flags: the flags; a flag with words that cannot be read has its default.
        mistakes: a line on each mistake. The line begins with the flag and names the way out.
        notes: a line on each flag that changes nothing, or is read as another flag. The line begins
            with the flag.
    """

    flags: Flags
    mistakes: tuple[str, ...]
    notes: tuple[str, ...]


Rule = Callable[[Flags], Iterator[str]]
"""A function that judges flags and yields a line on each finding."""


@cache
def declarations(group: type) -> Sequence[Declaration]:
    """Return the declarations of a group's flags, in order.

    Fields without a flag, such as groups inside the group, have none.
    """
    hints = get_type_hints(group)
    return tuple(
        declaration
        for field in dataclasses.fields(group)
        for declaration in _declared(field, hints[field.name])
    )


@cache
def all_declarations(groups: tuple[type, ...]) -> Mapping[str, Declaration]:
    """Return the declarations of some groups, by the flag as it stands on a command line."""
    found = [declaration for group in groups for declaration in declarations(group)]
    return {declaration.option: declaration for declaration in found}


def options_of(group: type, flags: object) -> Iterator[tuple[str, object]]:
    """Yield the flags of a group as they stand on a command line, with their values.

    Args:
        group: class of the group.
        flags: the values by name.
    """
    for declaration in declarations(group):
        yield declaration.option, declaration.flag_value(getattr(flags, declaration.name))


def _declared(field: "dataclasses.Field[Any]", kind: Any) -> Iterator[Declaration]:
    """Yield the flag of a field, or all its flags if every value has one of its own."""
    for one in field.metadata.get("spellings", ()):
        yield Declaration(field.name, bool, False, one.facts, one)
    if "facts" not in field.metadata:
        return
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    is_derived = field.metadata.get("derived", False)
    facts = field.metadata["facts"]
    yield Declaration(field.name, kind, field.default, facts, is_derived=is_derived)


def filled(
    groups: Sequence[type], given: Mapping[str, Sequence[str]], world_size: int = 1
) -> Flags:
    """Return the flags with the values that the words of a command line give them.

    Args:
        groups: groups of all flags.
        given: the words behind each given flag, all of them readable. Every other flag has its
            default, or ``None`` if it is required.
        world_size: ranks of the job.
    """

    def made(group: type) -> Any:
        values = {}
        for own in declarations(group):
            if own.option in given:
                values[own.name] = own.field_value(own.value(given[own.option]))
            elif own.default is dataclasses.MISSING:
                values[own.name] = None
        return group(**values)

    return Flags({group: made(group) for group in groups}, world_size, given)


def copied(config: "type[Config]", group: "DataclassInstance", **derived: Any) -> "Config":
    """Make a configuration from a group of flags, or a node with all values from a node of flags.

    Args:
        config: class of the configuration.
        group: flags, which become the fields of the same names.
        derived: the fields that have no flag of their name, or another value than the flag; flags
            of their names are not read.
    """
    names = {own.name for own in dataclasses.fields(config) if own.name not in derived}
    same = {f.name: getattr(group, f.name) for f in dataclasses.fields(group) if f.name in names}
    left = names - same.keys()
    assert not left, f"no flag and no derivation for {sorted(left)} of {config.__name__}"
    return config(**(same | derived))


def result_of(work: Callable[[], Result]) -> Result | None:
    """Return the result of a piece of work; ``None``: it has a fault, which ``faults_of`` yields.

    Rules use it for work whose faults another rule reports.
    """
    try:
        return work()
    except (ValueError, OSError):
        return None


def faults_of(work: Callable[[], object]) -> Iterator[str]:
    """Do a piece of work, and yield the text of the error that ends it, if there is one."""
    try:
        work()
    except (ValueError, OSError) as error:
        yield str(error)
