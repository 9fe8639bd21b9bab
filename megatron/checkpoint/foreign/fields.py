"""Reads the fields of a ``config.json`` one by one, and checks the value of each field."""

import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.native.files import read_text

MOST_LAYERS: Final = 10_000
"""Layers of the deepest model that is converted; a larger number means a damaged file."""

_WIDEST: Final = 1 << 26
"""The largest size in a model; a larger number means a damaged file."""

_REQUIRED: Final = object()


class Fields:
    """The fields of a configuration.

    Args:
        values: values of the fields, by name.
        origin: the file that the fields come from, for messages.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values = values
        self.origin = origin

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Return the fields of a file.

        Raises:
            ForeignError: the file cannot be read, or is not a JSON object.
        """
        try:
            values = json.loads(read_text(path))
        except FileNotFoundError:
            raise ForeignError(
                f"{path.parent} has no {path.name}: give the folder of a model"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ForeignError(f"{path} cannot be read ({error})") from error
        if not isinstance(values, dict):
            raise ForeignError(f"{path} does not hold the fields of a model")
        return cls(values, str(path))

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    @property
    def all(self) -> Mapping[str, Any]:
        """The fields by name."""
        return self._values

    def renamed(self, aliases: Mapping[str, str]) -> "Fields":
        """Return the fields without second names.

        Args:
            aliases: for each second name of a field, the field's name.

        Raises:
            ForeignError: a field has two values, by its two names.
        """
        given = {alias: name for alias, name in aliases.items() if alias in self._values}
        found = {name: value for name, value in self._values.items() if name not in given}
        origin = self.origin
        for alias, name in given.items():
            value = self._values[alias]
            origin += f" ({alias} there means {name})"
            if found.setdefault(name, value) != value:
                raise ForeignError(
                    f"{self.origin}: {alias} is {_short(value)} and {name} is "
                    f"{_short(found[name])}, two names of one field: remove the wrong one"
                )
        return Fields(found, origin)

    def is_null(self, name: str) -> bool:
        """Return whether a field is ``null``; a field that is left out is not."""
        return name in self._values and self._values[name] is None

    def any(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return the value of a field; a field that is ``null`` counts as left out.

        Raises:
            ForeignError: the field is left out, and there is no default.
        """
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ForeignError(f"{self.origin} has no {name}: it is damaged, or of another program")
        return default

    def whole(self, name: str, default: Any = _REQUIRED, most: int = _WIDEST) -> int:
        """Return a whole number from 1 to ``most``; 16.0 counts as a whole number."""
        value = self.any(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 1 <= value <= most or value != int(value):
            raise self.fault(name, f"a whole number from 1 to {most}")
        return int(value)

    def number(
        self,
        name: str,
        default: Any = _REQUIRED,
        least: float = 0.0,
        most: float = sys.float_info.max,
    ) -> float:
        """Return a finite number from ``least`` to ``most``."""
        value = self.any(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            has_limit = most < sys.float_info.max
            wanted = f"from {least:g} to {most:.0f}" if has_limit else f"of at least {least:g}"
            raise self.fault(name, f"a number {wanted}")
        return float(value)

    def positive(self, name: str, default: Any = _REQUIRED) -> float:
        """Return a finite number above 0."""
        value = self.number(name, default)
        if not value:
            raise self.fault(name, "a number above 0")
        return value

    def share(self, name: str, default: Any = _REQUIRED) -> float:
        """Return a number of at least 0 and below 1."""
        value = self.number(name, default)
        if value >= 1:
            raise self.fault(name, "a number of at least 0 and below 1")
        return value

    def truth(self, name: str, default: Any = _REQUIRED) -> bool:
        """Return true or false; ``null`` is false, as ``transformers`` reads it."""
        value = False if self.is_null(name) else self.any(name, default)
        if not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def whole_or_none(self, name: str, default: int | None) -> int | None:
        """Return a whole number.

        A field that is missing gives the default, and ``null`` gives ``None``.
        """
        lacks = name not in self._values and default is None
        return None if lacks or self.is_null(name) else self.whole(name, default)

    def words(self, name: str, allowed: Collection[str], count: int) -> list[str] | None:
        """Return a list of ``count`` allowed words; ``None``: the field is left out."""
        value = self.any(name, None)
        if value is None:
            return None
        right = isinstance(value, list) and len(value) == count
        if not right or any(not isinstance(one, str) or one not in allowed for one in value):
            raise self.fault(
                name, f"{count} words (num_hidden_layers) of {', '.join(sorted(allowed))}"
            )
        return list(value)

    def part(self, name: str) -> "Fields | None":
        """Return the fields within a field; ``None``: the field is left out."""
        value = self.any(name, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fault(name, "fields by name")
        return Fields(value, f"{self.origin}: {name}")

    def check(self, name: str, allowed: Collection[Any], default: Any = _REQUIRED) -> None:
        """Refuse a field whose value this program does not support.

        ``null`` counts as left out where the default is false, 0 or ``None``. Elsewhere it is
        refused: to ``transformers`` it is none of the allowed values.

        Raises:
            ForeignError: the value is not allowed; the message names the allowed values.
        """
        value = None if self.is_null(name) and default else self.any(name, default)
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise ForeignError(
                f"{self.origin}: {name} is {_short(value)}, and this program has only "
                f"{' or '.join(_short(one) for one in allowed)}"
            )

    def fault(self, name: str, wanted: str) -> ForeignError:
        """Return the error for a field whose value is not ``wanted``."""
        return ForeignError(
            f"{self.origin}: {name} is {_short(self._values.get(name))}, which is not {wanted}"
        )


def _short(value: object) -> str:
    return json.dumps(value, default=str)[:60]
