"""Reads the data in a Python file without running it: literals, classes with keywords, assignments.

A configuration in Python is mostly data: a class with keywords, or values that are assigned to
attributes. These are followed, also through functions of the same file. All else is *computed*: its
value is not known, and its line is told.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from megatron.foreign.faults import MOST_LOOKS
from megatron.foreign.python_reach import (
    CHANGERS,
    REACH_ALL,
    Chain,
    bound_in,
    called_in,
    chains_in,
    depth_of,
    grown_in,
    is_simple,
    may_return,
    root_of,
)
from megatron.foreign.python_values import (
    Computed,
    Early,
    Names,
    Record,
    Value,
    deep_copy,
    lose,
)

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
    *(ast.Pass, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.ClassDef, ast.Global, ast.Nonlocal),
)
_HARMLESS: Final = frozenset(
    {
        *("print", "len", "isinstance", "str", "int", "float", "bool", "min", "max", "abs"),
        *("round", "repr", "range"),
    }
)
"""Functions of Python that change none of their arguments."""


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
        self._forgotten: set[str] = set()
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
        self.notes.append(f"line {node.lineno}: {_head(node)}: {why}")

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MOST_LOOKS:
            raise ValueError("functions that call each other too often: give a shorter file")

    def _block(self, body: Sequence[ast.stmt], names: Names) -> tuple[bool, Value]:
        """Follow statements; return whether they return, and the value."""
        for at, statement in enumerate(body, 1):
            ends, value = self._statement(statement, names)
            if ends:
                if isinstance(value, Early):
                    self._forget(body[at:], names)
                return True, value
        return False, None

    def _statement(self, own: ast.stmt, names: Names) -> tuple[bool, Value]:
        match own:
            case ast.Return():
                return True, None if own.value is None else self._value(own.value, names)
            case ast.Assign(value=ast.expr() as node) | ast.AnnAssign(value=ast.expr() as node):
                value = self._value(node, names)
                for target in own.targets if isinstance(own, ast.Assign) else [own.target]:
                    self._put(target, value, names)
            case ast.If():
                return self._branch(own, names)
            case ast.Expr(value=ast.Constant()) | ast.AnnAssign():
                pass  # a docstring, or a type
            case ast.Expr(value=ast.Call() as call) if self._is_own(call) or _is_harmless(call):
                self._value(call, names)
            case ast.Assert():
                self._value(own.test, names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if names is not self.names:
                names[own.name] = Computed(own.lineno, f"def {own.name}")
            case _ if not isinstance(own, _SILENT):
                return self._left(own, [own], "not followed", names)
        return False, None

    def _is_own(self, call: ast.Call) -> bool:
        return isinstance(call.func, ast.Name) and call.func.id in self.functions

    def _branch(self, own: ast.If, names: Names) -> tuple[bool, Value]:
        holds = self._value(own.test, names)
        if isinstance(holds, bool | int | float | str | None):
            return self._block(own.body if holds else own.orelse, names)
        why = "not known, so what its branches assign is not"
        return self._left(own, [*own.body, *own.orelse], why, names)

    def _left(
        self, own: ast.stmt, body: Sequence[ast.stmt], why: str, names: Names
    ) -> tuple[bool, Value]:
        """Tell a statement that is not followed; a return in it leaves its function unknown."""
        self._note(own, why)
        self._forget(body, names)
        if not may_return(body):
            return False, None
        self.notes.append(
            f"line {own.lineno}: it may return, so the value of its function is not known"
        )
        return True, Early(own.lineno, f"a function that {_head(own)} may end")

    def _forget(self, body: Sequence[ast.AST], names: Names) -> None:
        """Let everything be computed that nodes which are not followed may change or assign."""
        chains, grown = [*chains_in(body)], grown_in(body)
        for chain in chains:
            if isinstance(chain.ctx, ast.Load) or id(chain) in grown:
                self._lose(chain, names)
        stores = [chain for chain in chains if not isinstance(chain.ctx, ast.Load)]
        for chain in sorted(stores, key=depth_of, reverse=True):
            self._put(chain, _unfollowed(chain), names)
        for name, line in bound_in(body):
            names[name] = Computed(line, f"def {name} or another statement that names it")
        for name in called_in(body):
            if name in REACH_ALL:
                self._forget_all(names, Computed(_line_of(body), f"{name}(...) may change it"))
            self._forget_called(name, names)

    def _forget_all(self, names: Names, why: Computed) -> None:
        """Let all variables be computed."""
        for known in (names, self.names):
            for name, value in known.items():
                lose(value, why, self._step)
                known[name] = value if isinstance(value, Record | list) else why

    def _forget_called(self, name: str, names: Names) -> None:
        """Let what a function of the file may change beside its arguments be computed."""
        own = names.get(name)
        if isinstance(own, Computed) and own.text.startswith(("def ", "lambda")):
            for value in names.values():  # it reaches all of the function in which it stands
                lose(value, Computed(own.line, own.text), self._step)
        elif name in self.functions and name not in self._forgotten:
            self._forgotten.add(name)
            self._forget(self.functions[name].body, {})
            self._forgotten.discard(name)

    def _lose(self, chain: Chain, names: Names) -> None:
        """Let the values of the record or list for which a chain stands be computed."""
        node = chain if is_simple(chain) else root_of(chain)
        if not isinstance(node, ast.Name) or node.id in names or node.id in self.names:
            lose(self._value(node, names), _unfollowed(chain), self._step)

    def _put(self, target: ast.expr, value: Value, names: Names) -> None:
        match target:
            case ast.Name():
                names[target.id] = value
            case ast.Tuple() | ast.List():
                self._put_each(target.elts, value, names)
            case ast.Attribute(attr="__dict__"):
                self._lose(target, names)
            case ast.Attribute():
                if isinstance(holder := self._holder(target.value, names), Record):
                    holder.values[target.attr] = value
            case ast.Subscript():
                key, holder = self._value(target.slice, names), self._holder(target.value, names)
                if isinstance(holder, Record) and isinstance(key, str):
                    holder.values[key] = value
                elif isinstance(holder, list) and _is_place(key, holder):
                    holder[key] = value  # type: ignore[index]
                else:
                    lose(holder, _unfollowed(target), self._step)

    def _put_each(self, targets: Sequence[ast.expr], value: Value, names: Names) -> None:
        starred = any(isinstance(own, ast.Starred) for own in targets)
        if isinstance(value, list) and len(value) == len(targets) and not starred:
            for target, own in zip(targets, list(value), strict=True):
                self._put(target, own, names)
            return
        for target in targets:
            lose(value, _unfollowed(target), self._step)
            inner = target.value if isinstance(target, ast.Starred) else target
            self._put(inner, value if isinstance(value, Computed) else _unfollowed(target), names)

    def _holder(self, node: ast.expr, names: Names) -> Record | list[Any] | None:
        """Return the record or list to which a value is assigned; a computed one is made one."""
        if isinstance(node, ast.Attribute) and node.attr == "__dict__":
            return self._holder(node.value, names)
        found = self._value(node, names)
        if isinstance(found, Computed):
            # The attribute of a computed value is part of this value, which is told once.
            is_part = isinstance(node, ast.Attribute) and found.text == _shown(node)
            found = Record(base=None if is_part else found)
            self._put(node, found, names)
        return found if isinstance(found, Record | list) else None

    def _value(self, node: ast.expr, names: Names) -> Value:
        self._step()
        match node:
            case ast.Constant(value=value) if isinstance(value, bool | int | float | str | None):
                return value
            case ast.Name(id=name) if name in names or name in self.names:
                return names[name] if name in names else self.names[name]
            case ast.Attribute():
                return self._attribute(node, names)
            case ast.Subscript():
                return self._element(node, names)
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
        if not isinstance(node, ast.Name):  # its parts may be shared, or changed by calls in it
            self._forget([node], names)
        return computed

    def _joined(
        self, is_or: bool, parts: Sequence[ast.expr], names: Names, computed: Computed
    ) -> Value:
        own: Value = None
        for part in parts:
            own = self._value(part, names)
            if not isinstance(own, bool | int | float | str | None):
                self._forget(parts, names)
                return computed
            if bool(own) is is_or:
                return own
        return own

    def _attribute(self, node: ast.Attribute, names: Names) -> Value:
        written = ast.unparse(node)
        if written in _DTYPES:
            return _DTYPES[written]
        own = self._value(node.value, names)
        computed = Computed(node.lineno, _shown(node))
        if not isinstance(own, Record):
            return computed
        if node.attr == "__dict__":  # another name of the same values
            return own
        if node.attr in CHANGERS:  # a method with a name of its own, which may be called later
            lose(own, computed, self._step)
        return own.values.get(node.attr, computed)

    def _element(self, node: ast.Subscript, names: Names) -> Value:
        own, key = self._value(node.value, names), self._value(node.slice, names)
        computed = Computed(node.lineno, _shown(node))
        if isinstance(own, list):
            if _is_place(key, own):
                return own[key]  # type: ignore[index, no-any-return]
            inner = list(own)
        elif isinstance(own, Record):
            if isinstance(key, str):
                return own.values.get(key, computed)
            inner = list(own.values.values())
        else:
            return computed
        for one in inner:  # one of them gets a second name
            lose(one, computed, self._step)
        return computed

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
        if self._is_own(node):
            given = self._with(Record(), keywords, names).values
            places, is_open = self._places(node.args, names)
            return self._called(self.functions[written], places, given, is_open=is_open)
        if last in ("replace", "deepcopy", "copy") and node.args:
            found = self._value(node.args[0], names)
            if isinstance(found, Record):
                if last == "deepcopy":
                    found = deep_copy(found, self._step)
                    assert isinstance(found, Record), "a record's copy is one"
                return self._with(Record(found.kind, {**found.values}, found.base), keywords, names)
        if last[:1].isupper() or written == "dict":
            record = self._with(Record("" if written == "dict" else written), keywords, names)
            for at, one in enumerate(node.args, 1):
                record.values[f"argument {at}"] = Computed(one.lineno, _shown(one))
            return record
        if _is_harmless(node):
            for one in node.args:
                self._value(one, names)
        else:
            self._forget([node], names)
        return Computed(node.lineno, _shown(node))

    def _places(self, nodes: Sequence[ast.expr], names: Names) -> tuple[list[Value], bool]:
        """Return the values of arguments without names, and whether more follow, not known."""
        found: list[Value] = []
        is_open = False
        for node in nodes:
            inner = node.value if isinstance(node, ast.Starred) else node
            own = self._value(inner, names)
            if inner is node:
                several: list[Value] = [own]
            elif isinstance(own, list) and not any(isinstance(one, Computed) for one in own):
                several = own
            else:
                is_open = True
            if is_open:  # what follows may stand for any argument
                self._forget([node], names)
            else:
                found += several
        return found, is_open

    def _called(
        self,
        own: ast.FunctionDef,
        places: Sequence[Value],
        given: Mapping[str, Value],
        *,
        is_first: bool = False,
        is_open: bool = False,
    ) -> Value:
        """Return the value of a function of the file.

        Args:
            own: the function.
            places: arguments without names.
            given: arguments by name.
            is_first: other names are no mistake.
            is_open: more arguments without names follow, which are not known.
        """
        if self._depth >= _DEEPEST:
            raise ValueError(f"line {own.lineno}: functions that call each other without end")
        names = self._bound(own, places, given, is_open=is_open)
        more = {name: value for name, value in given.items() if name not in names}
        names |= {name: value for name, value in given.items() if name in names}
        if own.args.kwarg is not None:
            names[own.args.kwarg.arg] = Record(values={} if is_first else more)
        self._depth += 1
        try:
            value = self._block(own.body, names)[1]
        finally:
            self._depth -= 1
        return Computed(value.line, value.text) if isinstance(value, Early) else value

    def _bound(
        self,
        own: ast.FunctionDef,
        places: Sequence[Value],
        given: Mapping[str, Value],
        *,
        is_open: bool,
    ) -> Names:
        """Return the values of a function's arguments that are not given by name."""
        parts = own.args
        positional = [*parts.posonlyargs, *parts.args]
        unknown: Names = {
            one.arg: Computed(own.lineno, f"argument {one.arg}")
            for one in (*positional, *parts.kwonlyargs)
        }
        defaults = [
            *zip(positional[len(positional) - len(parts.defaults) :], parts.defaults, strict=True),
            *((one, value) for one, value in zip(parts.kwonlyargs, parts.kw_defaults, strict=True)),
        ]
        names = dict(unknown)
        for one, default in defaults:
            if default is not None:
                names[one.arg] = self._value(default, {})
        if is_open:
            names |= {one.arg: unknown[one.arg] for one in positional}
        if "**" in given:
            names |= unknown
        names |= {one.arg: value for one, value in zip(positional, places, strict=False)}
        if parts.vararg is not None:
            rest: Value = list(places[len(positional) :])
            told = Computed(own.lineno, f"argument *{parts.vararg.arg}")
            names[parts.vararg.arg] = told if is_open else rest
        return names


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


def _is_harmless(call: ast.Call) -> bool:
    """Return whether a call changes none of its arguments."""
    return isinstance(call.func, ast.Name) and call.func.id in _HARMLESS and not call.keywords


def _is_place(key: Value, values: Sequence[Value]) -> bool:
    """Return whether a key is that of a value of a list."""
    return type(key) is int and -len(values) <= key < len(values)


def _unfollowed(node: ast.expr) -> Computed:
    return Computed(node.lineno, "... (may be changed by this line, which is not followed)")


def _line_of(body: Sequence[ast.AST]) -> int:
    """Return the number of the line of the first node that has one."""
    return next((node.lineno for node in body if isinstance(node, ast.stmt | ast.expr)), 0)


def _head(node: ast.stmt) -> str:
    """Return the beginning of a statement, of one with a block without the block."""
    text = _shown(node)
    return text.partition(":")[0] if isinstance(node, ast.If | ast.For) else text


def _shown(node: ast.AST) -> str:
    """Return the beginning of an expression in one line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
