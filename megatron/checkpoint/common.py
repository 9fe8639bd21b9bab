"""The values of a checkpoint that are not tensors, checked before they are used.

A digest shows that the file of values is as it was written. It does not detect wrong values if a
person has edited both the file and the manifest.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from megatron.checkpoint import folder
from megatron.checkpoint.folder import DamagedError
from megatron.native.files import read_bytes

COMMON: Final = "common.json"
"""File of all values that are not tensors."""

Common = Mapping[str, Any]
"""Values that JSON can hold, by name."""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_loss_scale(value: object) -> bool:
    """Return whether a value is the state of a loss scaler; ``None``: it counted nothing."""
    if not isinstance(value, Mapping):
        return value is None
    is_counted = _is_count(value.get("samples_without_step"))
    return is_counted and all(type(own) in (int, float) for own in value.values())


_SOUND: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "iteration": (_is_count, "a whole number, 0 or more"),
    "consumed_samples": (_is_count, "a whole number, 0 or more"),
    "optimizer_steps": (_is_count, "a whole number, 0 or more"),
    "has_optimizer": (lambda value: isinstance(value, bool), "true or false"),
    "model": (_is_mapping, "values by name"),
}


def read_common(where: Path) -> dict[str, Any]:
    """Return the values of a checkpoint that are not tensors.

    Raises:
        DamagedError: the file cannot be read.
    """
    path = where / COMMON
    try:
        content = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise DamagedError(f"{path} does not hold the values of a checkpoint")
    return content


def read_checked_common(where: Path) -> dict[str, Any]:
    """Return the values that are not tensors in the checkpoint of a training run.

    Raises:
        DamagedError: the file cannot be read, or holds values that no run saves; the message names
            the file.
    """
    common, path = read_common(where), where / COMMON
    for name, (is_sound, wanted) in _SOUND.items():
        if name not in common:
            raise DamagedError(f"{path} has no {name}: it is of another program, or was edited")
        if not is_sound(common[name]):
            raise DamagedError(
                f"{path}: {name} is {str(common[name])[:40]!r}, which is not {wanted}"
            )
    if not _is_mapping(common.get("optimizer", {})):
        raise DamagedError(f"{path}: optimizer is not values by name")
    if not _is_loss_scale(common.get("loss_scale")):
        raise DamagedError(f"{path}: loss_scale is not the numbers of a loss scale by name")
    iteration, steps = common["iteration"], common["optimizer_steps"]
    if where != folder.folder_of(where.parent, iteration):
        raise DamagedError(f"{path} is of iteration {iteration}, and {where.name} of another one")
    if steps > iteration:
        raise DamagedError(
            f"{path}: optimizer_steps is {steps}, more than the {iteration} iterations"
        )
    return common
