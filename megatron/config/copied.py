"""A configuration takes over the flags of the same name."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)


def copied(config: "type[Config]", group: "DataclassInstance", **derived: Any) -> "Config":
    """Make a configuration of a group of flags.

    Args:
        config: its class.
        group: its flags become the fields of the same name.
        derived: the other fields.
    """
    names = {field.name for field in fields(config)}
    same = {f.name: getattr(group, f.name) for f in fields(group) if f.name in names}
    left = names - same.keys() - derived.keys()
    assert not left, f"no flag and no derivation for {sorted(left)} of {config.__name__}"
    return config(**(same | derived))
