"""Reads the data in a Python file without running it: literals, classes with keywords, assignments.

A configuration in Python is mostly data: a class with keywords, or values that are assigned to
attributes. These are followed, also through functions of the same file. All else is *computed*: its
value is not known, and its line is told.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from megatron.commands.launch_scripts.faults import MOST_LOOKS

_DEEPEST: Final = 20
_LARGEST: Final = 1 << 63
_LONGEST: Final = 100

_DTYPES: Final = {
    "torch.float32": "fp32", "torch.float": "fp32", "torch.bfloat16": "bf16",
    "torch.float16": "fp16", "torch.half": "fp16",
}  # fmt: skip
"""PyTorch's types of numbers, and their words."""

_SUMS: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_COMPARED: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_SILENT: Final = (
    *(ast.Pass, ast.Import, ast.ImportFrom, ast.Assert, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.ClassDef, ast.Global, ast.Nonlocal),
)


@dataclass(frozen=True)
class Computed:
    """A value that only a run would tell.

    Attributes:
        line: number of the line that computes it.
        text: the beginning of the expression.
    """

    line: int
    text: str


@dataclass
class Record:
    """Values by name: a dict, or a class with keywords.

    Attributes:
        kind: the class as the file names it; empty for a dict.
        values: by name, those of attributes that were assigned later among them.
        base: the computed value to which attributes were assigned; ``None``: there is none.
    """

    kind: str = ""
    values: "dict[str, Value]" = field(default_factory=dict)
    base: Computed | None = None


Scalar: TypeAlias = bool | int | float | str | None
Value: TypeAlias = "Scalar | list[Any] | Record | Computed"
Names: TypeAlias = dict[str, Value]


class PythonData:
    """The data of a file.

    Args:
        text: of the file.
        given: values of arguments of the functions that ``call`` reads.

    Attributes:
        functions: by name.
        names: values of the file's variables.
        notes: lines on statements that were not followed, since ``call``.

    Raises:
        ValueError: the text is no Python.
    """

    def __init__(self, text: str, given: Mapping[str, str] | None = None) -> None:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"is no Python that can be read: {error}") from None
        self.functions = {own.name: own for own in tree.body if isinstance(own, ast.FunctionDef)}
        self.names: Names = {}
        self.notes: list[str] = []
        self._given = {name: _literal(value) for name, value in (given or {}).items()}
        self._depth = self._steps = 0
        try:
            self._block(tree.body, self.names)
        except RecursionError:
            raise ValueError("expressions are nested too deeply") from None

    def call(self, name: str) -> Value:
        """Return the value of a function for its own defaults.

        Raises:
            ValueError: the functions call each other too often.
        """
        self.notes = []
        try:
            return self._called(self.functions[name], [], dict(self._given), is_first=True)
        except RecursionError:
            raise ValueError("expressions are nested too deeply") from None

    def _note(self, node: ast.stmt, why: str) -> None:
        text = (
            _shown(node).partition(":")[0] if isinstance(node, ast.If | ast.For) else _shown(node)
        )
        self.notes.append(f"line {node.lineno}: {text}: {why}")

    def _block(self, body: Sequence[ast.stmt], names: Names) -> tuple[bool, Value]:
        """Follow statements; return whether they return, and the value."""
        for statement in body:
            ends, value = self._statement(statement, names)
            if ends:
                return True, value
        return False, None

    def _statement(self, own: ast.stmt, names: Names) -> tuple[bool, Value]:
        if isinstance(own, ast.Return):
            return True, None if own.value is None else self._value(own.value, names)
        if isinstance(own, ast.Assign | ast.AnnAssign):
            if own.value is not None:
                value = self._value(own.value, names)
                for target in own.targets if isinstance(own, ast.Assign) else [own.target]:
                    self._put(target, value, names)
        elif isinstance(own, ast.If):
            return self._branch(own, names)
        elif isinstance(own, ast.Expr) and isinstance(own.value, ast.Constant):
            pass  # a docstring
        elif not isinstance(own, _SILENT):
            self._note(own, "not followed")
            self._forget([own], names)
        return False, None

    def _branch(self, own: ast.If, names: Names) -> tuple[bool, Value]:
        holds = self._value(own.test, names)
        if isinstance(holds, bool | int | float | str | None):
            return self._block(own.body if holds else own.orelse, names)
        self._note(own, "not known, so what its branches assign is not")
        self._forget([*own.body, *own.orelse], names)
        return False, None

    def _forget(self, body: Sequence[ast.stmt], names: Names) -> None:
        """Let everything be computed to which statements may assign."""
        for node in (inner for own in body for inner in ast.walk(own)):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                self._put(node, Computed(node.lineno, "... (its statement is not followed)"), names)

    def _put(self, target: ast.expr, value: Value, names: Names) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            known = isinstance(value, list) and len(value) == len(target.elts)
            for at, inner in enumerate(target.elts):
                self._put(inner, value[at] if known else value, names)  # type: ignore[index]
        elif isinstance(target, ast.Attribute):
            if (record := self._record(target.value, names)) is not None:
                record.values[target.attr] = value
        elif isinstance(target, ast.Subscript):
            key, record = self._value(target.slice, names), self._record(target.value, names)
            if record is not None and isinstance(key, str):
                record.values[key] = value

    def _record(self, node: ast.expr, names: Names) -> Record | None:
        """Return the record to whose attribute a value is assigned; a computed one becomes one."""
        found = self._value(node, names)
        if isinstance(found, Computed):
            # The attribute of a computed value is part of this value, which is told once.
            is_part = isinstance(node, ast.Attribute) and found.text == _shown(node)
            found = Record(base=None if is_part else found)
            self._put(node, found, names)
        return found if isinstance(found, Record) else None

    def _value(self, node: ast.expr, names: Names) -> Value:
        self._steps += 1
        if self._steps > MOST_LOOKS:
            raise ValueError("functions that call each other too often: give a shorter file")
        match node:
            case ast.Constant(value=value) if isinstance(value, bool | int | float | str | None):
                return value
            case ast.Name(id=name) if name in names or name in self.names:
                return names[name] if name in names else self.names[name]
            case ast.Attribute():
                return self._attribute(node, names)
            case ast.List(elts=inner) | ast.Tuple(elts=inner):
                return [self._value(own, names) for own in inner]
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                keys = ((None if k is None else self._value(k, names), v) for k, v in pairs)
                return self._with(Record(), keys, names)
            case ast.Call():
                return self._call(node, names)
            case ast.IfExp():
                holds = self._value(node.test, names)
                if isinstance(holds, bool | int | float | str | None):
                    return self._value(node.body if holds else node.orelse, names)
        return self._sum(node, names)

    def _sum(self, node: ast.expr, names: Names) -> Value:
        """Return the value of an operation on known numbers or texts."""
        computed = Computed(node.lineno, _shown(node))
        match node:
            case ast.UnaryOp(op=ast.USub() | ast.Not() as sign, operand=inner):
                own = self._value(inner, names)
                if isinstance(sign, ast.Not):
                    return not own if isinstance(own, bool | None) else computed
                return -own if isinstance(own, int | float) else computed
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SUMS:
                both = [self._value(n, names) for n in (left, right)]
                found = _of_two(_SUMS[type(sign)], both)
                return computed if found is None else found
            case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _COMPARED:
                both = [self._value(n, names) for n in (left, right)]
                found = _compared(type(sign), both)
                return computed if found is None else found
            case ast.BoolOp(op=sign, values=parts):
                return self._joined(isinstance(sign, ast.Or), parts, names, computed)
        return computed

    def _joined(
        self, is_or: bool, parts: Sequence[ast.expr], names: Names, computed: Computed
    ) -> Value:
        own: Value = None
        for part in parts:
            own = self._value(part, names)
            if not isinstance(own, bool | int | float | str | None):
                return computed
            if bool(own) is is_or:
                return own
        return own

    def _attribute(self, node: ast.Attribute, names: Names) -> Value:
        written = ast.unparse(node)
        if written in _DTYPES:
            return _DTYPES[written]
        own = self._value(node.value, names)
        if isinstance(own, Record) and node.attr in own.values:
            return own.values[node.attr]
        return Computed(node.lineno, _shown(node))

    def _with(
        self, record: Record, pairs: Iterator[tuple[Value, ast.expr]], names: Names
    ) -> Record:
        """Add values to a record; a name that is ``None`` stands for ``**``."""
        for key, node in pairs:
            value = self._value(node, names)
            if key is not None:
                record.values[str(key)] = value
            elif isinstance(value, Record):
                record.values |= value.values
            else:
                record.values["**"] = Computed(node.lineno, _shown(node))
        return record

    def _call(self, node: ast.Call, names: Names) -> Value:
        written = ast.unparse(node.func)
        last = written.rpartition(".")[2]
        keywords = ((own.arg, own.value) for own in node.keywords)
        if written in self.functions:
            given = self._with(Record(), keywords, names).values
            own = [self._value(one, names) for one in node.args]
            return self._called(self.functions[written], own, given)
        if last in ("replace", "deepcopy", "copy") and node.args:
            found = self._value(node.args[0], names)
            if isinstance(found, Record):
                return self._with(_copied(found), keywords, names)
        if last[:1].isupper() or written == "dict":
            record = self._with(Record("" if written == "dict" else written), keywords, names)
            for at, one in enumerate(node.args, 1):
                record.values[f"argument {at}"] = Computed(one.lineno, _shown(one))
            return record
        return Computed(node.lineno, _shown(node))

    def _called(
        self,
        own: ast.FunctionDef,
        places: Sequence[Value],
        given: Mapping[str, Value],
        *,
        is_first: bool = False,
    ) -> Value:
        """Return the value of a function of the file; ``is_first``: other names are no mistake."""
        if self._depth >= _DEEPEST:
            raise ValueError(f"line {own.lineno}: functions that call each other without end")
        parts = own.args
        positional = [*parts.posonlyargs, *parts.args]
        names: Names = {
            one.arg: Computed(own.lineno, f"argument {one.arg}")
            for one in (*positional, *parts.kwonlyargs)
        }
        defaults = [
            *zip(positional[len(positional) - len(parts.defaults) :], parts.defaults, strict=True),
            *((one, value) for one, value in zip(parts.kwonlyargs, parts.kw_defaults, strict=True)),
        ]
        for one, default in defaults:
            if default is not None:
                names[one.arg] = self._value(default, {})
        names |= {one.arg: value for one, value in zip(positional, places, strict=False)}
        more = {name: value for name, value in given.items() if name not in names}
        names |= {name: value for name, value in given.items() if name in names}
        if parts.kwarg is not None:
            names[parts.kwarg.arg] = Record(values={} if is_first else more)
        self._depth += 1
        try:
            return self._block(own.body, names)[1]
        finally:
            self._depth -= 1


def _of_two(operation: Callable[[Any, Any], Any], both: Sequence[Value]) -> Value:
    """Return the result of an operation on two numbers; ``None``: they are none, or too large."""
    if not all(isinstance(own, int | float) and not isinstance(own, bool) for own in both):
        return None
    try:
        found: int | float = operation(*both)
    except (ArithmeticError, ValueError):
        return None
    return found if abs(found) < _LARGEST else None


def _compared(sign: type[ast.cmpop], both: Sequence[Value]) -> bool | None:
    """Return the result of a comparison; ``None``: it is not known."""
    is_none = sign in (ast.Is, ast.IsNot) and None in both
    known = list | Record if is_none else None
    if not all(isinstance(own, bool | int | float | str | None | known) for own in both):
        return None
    try:
        return _COMPARED[sign](*both)
    except TypeError:
        return None


def _literal(text: str) -> Value:
    """Return the value of a word of the command line: a number, True, False, None, or a text."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return text
    return found if isinstance(found, bool | int | float | str | None) else text


def _copied(record: Record) -> Record:
    values = {n: _copied(v) if isinstance(v, Record) else v for n, v in record.values.items()}
    return Record(record.kind, values, record.base)


def _shown(node: ast.AST) -> str:
    """Return the beginning of an expression in one line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
