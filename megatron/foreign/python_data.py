"""Reads the data in a Python file without running it: literals, classes with keywords, assignments.

A configuration in Python is mostly data: a class with keywords, or values that are assigned to
attributes. These are followed, also through functions of the same file. All else is *computed*: its
value is not known, and its line is told.
"""

import ast
from collections.abc import Mapping, Sequence
from typing import Final

from megatron.foreign.python_expressions import Expressions
from megatron.foreign.python_operations import head, is_harmless, literal
from megatron.foreign.python_reach import may_return
from megatron.foreign.python_values import Computed, Early, Names, Record, Value

_DEEPEST: Final = 20
_SILENT: Final = (
    *(ast.Pass, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.ClassDef, ast.Global, ast.Nonlocal),
)


class PythonData(Expressions):
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
        super().__init__({own.name: own for own in tree.body if isinstance(own, ast.FunctionDef)})
        self.notes: list[str] = []
        self._given = {name: literal(value) for name, value in (given or {}).items()}
        self._depth = 0
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
        self.notes.append(f"line {node.lineno}: {head(node)}: {why}")

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
            case ast.Expr(value=ast.Call() as call) if self._is_own(call) or is_harmless(call):
                self._value(call, names)
            case ast.Assert():
                self._value(own.test, names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if names is not self.names:
                names[own.name] = Computed(own.lineno, f"def {own.name}")
            case _ if not isinstance(own, _SILENT):
                return self._left(own, [own], "not followed", names)
        return False, None

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
        return True, Early(own.lineno, f"a function that {head(own)} may end")

    def _called(
        self,
        own: ast.FunctionDef,
        places: Sequence[Value],
        given: Mapping[str, Value],
        *,
        is_first: bool = False,
        is_open: bool = False,
    ) -> Value:
        """As in ``Expressions``."""
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
