"""Finds the values of expressions in a Python file without running it."""

import ast
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from megatron.foreign.python_changes import Changes
from megatron.foreign.python_operations import (
    COMPARED,
    DTYPES,
    SUMS,
    compared,
    is_harmless,
    is_place,
    of_two,
    shown,
)
from megatron.foreign.python_reach import CHANGERS, REACH_ALL
from megatron.foreign.python_values import Computed, Names, Record, Value, deep_copy, lose


class Expressions(Changes):
    """Finds the values of expressions; a subclass follows the functions that they call."""

    @abstractmethod
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

    def _is_own(self, call: ast.Call) -> bool:
        return isinstance(call.func, ast.Name) and call.func.id in self.functions

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
        computed = Computed(node.lineno, shown(node))
        match node:
            case ast.UnaryOp(op=ast.USub() | ast.Not() as sign, operand=inner):
                own = self._value(inner, names)
                if isinstance(sign, ast.Not):
                    return not own if isinstance(own, bool | None) else computed
                return -own if isinstance(own, int | float) else computed
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in SUMS:
                both = [self._value(n, names) for n in (left, right)]
                found = of_two(SUMS[type(sign)], both)
                return computed if found is None else found
            case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in COMPARED:
                both = [self._value(n, names) for n in (left, right)]
                found = compared(type(sign), both)
                return computed if found is None else found
            case ast.BoolOp(op=sign, values=parts):
                return self._joined(isinstance(sign, ast.Or), parts, names, computed)
        if not isinstance(node, ast.Name):  # its parts may be shared, or changed by calls in it
            self._forget([node], names)
        elif node.id in REACH_ALL and node.id not in self.functions:  # it gets another name
            self._forget_all(names, Computed(node.lineno, f"{node.id} may change it"))
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
        if written in DTYPES:
            return DTYPES[written]
        own = self._value(node.value, names)
        computed = Computed(node.lineno, shown(node))
        if not isinstance(own, Record):
            return computed
        if node.attr == "__dict__":  # another name of the same values
            return own
        if node.attr in CHANGERS and node.attr not in own.values:  # a method, to be called later
            lose(own, computed, self._step)
        return own.values.get(node.attr, computed)

    def _element(self, node: ast.Subscript, names: Names) -> Value:
        own, key = self._value(node.value, names), self._value(node.slice, names)
        computed = Computed(node.lineno, shown(node))
        if isinstance(own, list):
            if is_place(key, own):
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
                record.values["**"] = Computed(node.lineno, shown(node))
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
                record.values[f"argument {at}"] = Computed(one.lineno, shown(one))
            return record
        if is_harmless(node):
            for one in node.args:
                self._value(one, names)
        else:
            self._forget([node], names)
        return Computed(node.lineno, shown(node))

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
