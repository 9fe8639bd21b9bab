"""A tree of settings: a node is a frozen dataclass of flags, and may have nodes as fields.

A field's name is unique in its tree, so a name alone says where a value stands. Values in a file
are therefore kept by name: moving a field to another node leaves every file readable.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from megatron.flags.checks import is_idle
from megatron.flags.declare import Declaration
from megatron.flags.groups import declarations

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Node = TypeVar("Node", bound=DataclassInstance)


@cache
def nodes_of(kind: Any) -> Mapping[str, type]:
    """Return the nodes directly below a node, by the names of their fields."""
    hints = get_type_hints(kind)
    below = {field.name: hints[field.name] for field in fields(kind)}
    return MappingProxyType({name: own for name, own in below.items() if _is_node(own)})


def _is_node(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind) and bool(declarations(kind))


@cache
def kinds_in(kind: Any) -> tuple[type, ...]:
    """Return the classes of all nodes of a tree, from its root downwards."""
    return (kind, *(own for below in nodes_of(kind).values() for own in kinds_in(below)))


@cache
def defaults_of(kind: Any) -> Mapping[str, Any]:
    """Return the defaults of a tree's values by name; a value that must be given has none."""
    found = dict[str, Any]()
    for own in kinds_in(kind):
        found |= {f.name: f.default for f in fields(own) if isinstance(f.default, _PLAIN)}
    return MappingProxyType(found)


def values_of(node: Any) -> dict[str, Any]:
    """Return all values of a tree by name."""
    kind: Any = type(node)
    below = nodes_of(kind)
    found = {name: value for name, value in vars(node).items() if name not in below}
    for name in below:
        found |= values_of(getattr(node, name))
    return found


def made(kind: "type[Node]", values: Mapping[str, Any]) -> "Node":
    """Return the tree with some values; every other value has its default.

    Args:
        kind: class of the root.
        values: the values by name.

    Raises:
        TypeError: a value is missing that has no default, or no field of the tree has a name.
    """
    left = dict(values)
    node = _taken(kind, left)
    _refuse(kind, left)
    return node


def _taken(kind: "type[Node]", left: dict[str, Any]) -> "Node":
    """Return a node of the values that belong to it, which are removed from ``left``."""
    below = nodes_of(kind)
    own: dict[str, Any] = {
        name: _taken(node, left) for name, node in below.items() if name not in left
    }
    names = {field.name for field in fields(kind)}
    return kind(**own, **{name: left.pop(name) for name in names & left.keys()})


def changed(node: "Node", **values: Any) -> "Node":
    """Return a copy of a tree with other values, by name; errors as in ``made``."""
    left = dict(values)
    copy = _changed(node, left)
    _refuse(type(node), left)
    return copy


def _changed(node: "Node", left: dict[str, Any]) -> "Node":
    names = vars(node).keys() & left.keys()
    own = {name: left.pop(name) for name in names}
    for name in nodes_of(type(node)).keys() - own.keys() if left else ():
        before = getattr(node, name)
        after = _changed(before, left)
        if after is not before:
            own[name] = after
    return replace(node, **own) if own else node


def _refuse(kind: type, unknown: Mapping[str, Any]) -> None:
    if unknown:
        raise TypeError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}")


@cache
def declared_in(kind: Any) -> Mapping[str, tuple[Declaration, ...]]:
    """Return the flags of a tree by the name of their field."""
    found = dict[str, tuple[Declaration, ...]]()
    for own in kinds_in(kind):
        for one in declarations(own):
            found[one.name] = (*found.get(one.name, ()), one)
    return MappingProxyType(found)


def flags_of(node: Any) -> dict[str, list[str]]:
    """Return the flags that make a tree, each with the words behind it.

    A flag with its default is left out. So is a flag whose value another flag decides.
    """
    kind: Any = type(node)
    values = values_of(node)
    declared = {one.option: one for own in declared_in(kind).values() for one in own}
    by_option = {option: one.flag_value(values[one.name]) for option, one in declared.items()}
    found = dict[str, list[str]]()
    for option, value in by_option.items():
        one = declared[option]
        is_asked = value is not None and value is not False and value != one.default
        may_be_decided = one.is_derived and one.facts.is_told_if_derived
        if is_asked and not (may_be_decided and is_idle(one, declared, by_option)):
            found[option] = one.words(value)
    return found


def told(kind: Any, name: str, value: Any) -> Iterator[str]:
    """Yield the flags that give a field of a tree a value, as they stand on a command line.

    Args:
        kind: class of the root.
        name: the field's name.
        value: the value. For ``None``, for ``False`` and for the default of a field with a flag for
            every value, nothing is yielded.
    """
    for one in declared_in(kind)[name]:
        flag_value = one.flag_value(value)
        if flag_value is not None and flag_value is not False:
            yield one.shown(flag_value)


_PLAIN = (bool, int, float, str, tuple, type(None))
