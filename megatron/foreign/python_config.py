"""From a configuration in Python to its trainings: functions of torchtitan and of Megatron-Bridge.

The file is read as data (``python_data``), and nothing of it is run. Each function that returns a
configuration is a training. Values that a run would compute are told by line.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from megatron.foreign.configs import Named, flags_of_keys
from megatron.foreign.launches import Launch
from megatron.foreign.page import Source
from megatron.foreign.python_data import PythonData
from megatron.foreign.python_values import Computed, Record, Value
from megatron.foreign.torchtitan import Translation, translated
from megatron.foreign.torchtitan_keys import EVERYTHING
from megatron.foreign.values import Holes

Family = Literal["torchtitan", "Megatron-Bridge", "keys"]

_FAMILIES: Final[Mapping[str, Family]] = {
    "Trainer.Config": "torchtitan",
    "JobConfig": "torchtitan",
    "ConfigContainer": "Megatron-Bridge",
}
"""The last words of a class, or of what a function says that it returns."""

_SECTIONS: Final[tuple[tuple[frozenset[str], Family], ...]] = (
    (frozenset({"training", "parallelism"}), "torchtitan"),
    (frozenset({"model", "train"}), "Megatron-Bridge"),
)
"""Sections that a configuration without the name of a class has."""

_FUNCTION: Final = re.compile(r"(?:torch\.nn\.functional|F)\.\w+")
_MOST_LINES: Final = 40
_MOST_VALUES: Final = 5_000
"""Values of the largest configuration; a record may stand at any number of places."""

_WAY_OUT: Final = (
    "Megatron-Bridge writes all values of a configuration: config.to_yaml('config.yaml'); give "
    "that file, or the flags of Megatron-LM in a launch script"
)


class _Found(NamedTuple):
    """A configuration in a file: its name, the number of its line, its values, its notes."""

    name: str
    line: int
    values: Record
    family: Family
    notes: tuple[str, ...] = ()


def read_python(
    path: Path, text: str, given: Mapping[str, str], *, has_model: bool
) -> tuple[Source, tuple[Launch, ...]]:
    """Return the trainings of a Python file.

    Args:
        path: the file.
        text: its text.
        given: values of arguments of its functions.
        has_model: whether the user tells the sizes of the model.

    Raises:
        ValueError: the text is no Python, or no configuration of plain data is in it.
    """
    try:
        return _read(path, text, given, has_model=has_model)
    except RecursionError:
        raise ValueError("records or expressions are nested too deeply: flatten them") from None


def _read(
    path: Path, text: str, given: Mapping[str, str], *, has_model: bool
) -> tuple[Source, tuple[Launch, ...]]:
    data = PythonData(text, given)
    found = [*_functions(data)] or [*_variables(data)]
    both = [(own, _launch(own, has_model=has_model)) for own in found]
    launches = tuple(launch for _, launch in both if launch is not None)
    left = [
        f"{own.name} is left out: line {base.line}: {base.text}: computed, and not read"
        for own, launch in both
        if launch is None and (base := own.values.base) is not None
    ]
    if not launches:
        raise ValueError(
            "there is no configuration of plain data in it: no function or variable that is a "
            f"Trainer.Config of torchtitan or a ConfigContainer of Megatron-Bridge. {_WAY_OUT}"
            + "".join(f"\n{note}" for note in left)
        )
    notes = left
    if len(launches) > 1:
        names = (f"{at} {own.program.split()[0]}" for at, own in enumerate(launches, 1))
        notes.append(f"configurations (--launch N chooses one): {', '.join(names)}")
    notes += _unused(given, data)
    return Source(str(path), Holes(), tuple(notes)), launches


def _unused(given: Mapping[str, str], data: PythonData) -> Iterator[str]:
    """Yield a note on each given value that no function has as an argument."""
    known = {
        one.arg
        for own in data.functions.values()
        for one in (*own.args.posonlyargs, *own.args.args, *own.args.kwonlyargs)
    }
    yield from (f"--set {name}: no function has this argument" for name in given.keys() - known)


def _functions(data: PythonData) -> Iterator[_Found]:
    for name, own in data.functions.items():
        value = data.call(name)
        says = "" if own.returns is None else ast.unparse(own.returns).strip("\"'")
        if isinstance(value, Computed):  # such as the result of another file's function
            value = Record(base=value)
        if isinstance(value, Record) and (family := _family(value, says)) is not None:
            yield _Found(name, own.lineno, value, family, tuple(data.notes))


def _variables(data: PythonData) -> Iterator[_Found]:
    for name, value in data.names.items():
        if isinstance(value, Record):
            yield _Found(name, 0, value, _family(value, "") or "keys")


def _family(value: Record, says: str) -> Family | None:
    for end, family in _FAMILIES.items():
        if any(name == end or name.endswith(f".{end}") for name in (value.kind, says)):
            return family
    names = value.values.keys()
    return next((family for own, family in _SECTIONS if own <= names), None)


def _launch(found: _Found, *, has_model: bool) -> Launch | None:
    """Return a training; ``None``: the values are none of a training."""
    unread: list[tuple[int, str]] = []
    table = _Plain(unread).values(found.values, "")
    if found.family == "torchtitan":
        own = _of_torchtitan(found, table, unread, has_model=has_model)
    else:
        own = flags_of_keys(table)
    if len([word for word in own.words if word.startswith("--")]) < 2:
        return None
    notes = [*found.notes, *own.notes]
    if own.left:
        notes.append(f"not translated: {', '.join(own.left)}")
    if found.family != "torchtitan" and not has_model and "--num-layers" not in own.words:
        notes.append(
            "the sizes of the model stand in other code: give --model config.json, the file of the "
            "same model in Hugging Face's form"
        )
    lines = [f"line {line}: {what}: computed, and not read" for line, what in sorted(unread)]
    notes += lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        notes.append(f"and {len(lines) - _MOST_LINES} more values that are computed")
    if lines and found.family != "torchtitan":
        notes.append(_WAY_OUT)
    of = "with flags" if found.family == "keys" else f"of {found.family}"
    program = f"{found.name} (a configuration {of})"
    return Launch(
        found.line, "torchrun", own.ranks, program, tuple(own.words), 1, tuple(notes), True
    )


class _Plain:
    """Takes the known values out of records.

    Args:
        unread: gets the other values: their lines and names.
    """

    def __init__(self, unread: list[tuple[int, str]]) -> None:
        self._unread = unread
        self._open: set[int] = set()
        self._count = 0

    def values(self, record: Record, prefix: str) -> dict[str, Any]:
        """Return the known values of a record.

        Args:
            record: the record.
            prefix: the keys that lead to it, each with a dot behind it.

        Raises:
            ValueError: the record holds itself, or there are too many values.
        """
        if id(record) in self._open:
            raise ValueError(f"{prefix[:-1]} is a record that holds itself: remove this assignment")
        self._open.add(id(record))
        found: dict[str, Any] = {}
        if record.base is not None:
            of = f" of {prefix[:-1]}" if prefix else ""
            self._unread.append((record.base.line, f"values{of} from {record.base.text}"))
        for name, value in record.values.items():
            self._count += 1
            if self._count > _MOST_VALUES:
                raise ValueError(f"there are more than {_MOST_VALUES:,} values in it: shorten it")
            own = self._value(value, f"{prefix}{name}")
            if not isinstance(own, Computed):
                found[name] = own
        self._open.discard(id(record))
        return found

    def _value(self, value: Value, key: str) -> Any:
        """Return a known value; a computed one is told, and returned as it is."""
        if isinstance(value, Record):
            return self.values(value, f"{key}.")
        if isinstance(value, Computed):
            if _FUNCTION.fullmatch(value.text):
                return Named(value.text)
            self._unread.append((value.line, f"{key} = {value.text}"))
        if isinstance(value, list):
            computed = [own for own in value if isinstance(own, Computed)]
            self._unread += [(own.line, f"{key} has {own.text}") for own in computed]
            known = [own for own in value if isinstance(own, bool | int | float | str)]
            return computed[0] if computed else known
        return value.replace("\0", "") if isinstance(value, str) else value


def _of_torchtitan(
    found: _Found, table: dict[str, Any], unread: list[tuple[int, str]], *, has_model: bool
) -> Translation:
    """Return the flags of a configuration of torchtitan, whose model a registry has."""
    flavor = "?"
    for at, (_, what) in enumerate(unread):
        if name := re.match(r"model_spec = \w+\(['\"]([^'\"]+)", what):
            flavor = name[1]
            del unread[at]
            break
    if not isinstance(table.get("model"), Mapping):
        table["model"] = {"name": found.name, "flavor": flavor}
    computed = frozenset(re.split(r" = | from ", what)[0] for _, what in unread)
    computed |= {name.removeprefix("values of ") for name in computed}
    if found.values.base is not None:
        computed |= {EVERYTHING}
    return translated(table, has_model=has_model, computed=computed)
