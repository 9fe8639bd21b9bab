"""From a configuration in Python to its trainings: functions of torchtitan and of Megatron-Bridge.

The file is read as data (``python_data``), and nothing of it is run. Each function that returns a
configuration is a training. Values that a run would compute are told by line.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from megatron.commands.launch_scripts.configs import Named, flags_of_keys
from megatron.commands.launch_scripts.launches import Launch
from megatron.commands.launch_scripts.page import Source
from megatron.commands.launch_scripts.python_data import Computed, PythonData, Record, Value
from megatron.commands.launch_scripts.torchtitan import Translation, translated
from megatron.commands.launch_scripts.values import Holes

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
    data = PythonData(text, given)
    found = [*_functions(data)] or [*_variables(data)]
    launches = tuple(
        launch for own in found if (launch := _launch(own, has_model=has_model)) is not None
    )
    if not launches:
        raise ValueError(
            "there is no configuration of plain data in it: no function or variable that is a "
            f"Trainer.Config of torchtitan or a ConfigContainer of Megatron-Bridge. {_WAY_OUT}"
        )
    notes = []
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
    table = _plain(found.values, "", unread)
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


def _plain(record: Record, prefix: str, unread: list[tuple[int, str]]) -> dict[str, Any]:
    """Return the known values, and add the others to ``unread`` with their lines and names."""
    found: dict[str, Any] = {}
    if record.base is not None:
        of = f" of {prefix[:-1]}" if prefix else ""
        unread.append((record.base.line, f"values{of} from {record.base.text}"))
    for name, value in record.values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Record):
            found[name] = _plain(value, f"{key}.", unread)
        elif isinstance(value, Computed) and _FUNCTION.fullmatch(value.text):
            found[name] = Named(value.text)
        elif isinstance(value, Computed):
            unread.append((value.line, f"{key} = {value.text}"))
        elif isinstance(value, list):
            found[name] = [own for own in value if _is_known(own, key, unread)]
        else:
            found[name] = value.replace("\0", "") if isinstance(value, str) else value
    return found


def _is_known(value: Value, key: str, unread: list[tuple[int, str]]) -> bool:
    """Return whether an element of a list is known; what is within records of lists is left."""
    if isinstance(value, Computed):
        unread.append((value.line, f"{key} has {value.text}"))
    return isinstance(value, bool | int | float | str)


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
    return translated(table, has_model=has_model, computed=computed)
