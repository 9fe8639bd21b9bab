"""Follows changes of the data in a Python file: assignments, and code that is not followed.

A value is assigned to a name, or to a part of a record or a list. What code that is not followed
may change is *computed* from then on.
"""

import ast
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from megatron.foreign.faults import MOST_LOOKS
from megatron.foreign.python_operations import is_place, line_of, shown, unfollowed
from megatron.foreign.python_reach import (
    REACH_ALL,
    Chain,
    bound_in,
    called_in,
    chains_in,
    depth_of,
    grown_in,
    is_simple,
    root_of,
)
from megatron.foreign.python_values import Computed, Names, Record, Value, lose


class Changes(ABC):
    """Changes variables, records and lists; a subclass finds the values of expressions.

    Args:
        functions: of the file, by name.
    """

    def __init__(self, functions: dict[str, ast.FunctionDef]) -> None:
        self.functions = functions
        self.names: Names = {}
        self._steps = 0
        self._forgotten: set[str] = set()

    @abstractmethod
    def _value(self, node: ast.expr, names: Names) -> Value:
        """Return the value of an expression."""

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MOST_LOOKS:
            raise ValueError("functions that call each other too often: give a shorter file")

    def _forget(self, body: Sequence[ast.AST], names: Names) -> None:
        """Let everything be computed that nodes which are not followed may change or assign."""
        chains, grown = [*chains_in(body)], grown_in(body)
        for chain in chains:
            if isinstance(chain.ctx, ast.Load) or id(chain) in grown:
                self._lose(chain, names)
        stores = [chain for chain in chains if not isinstance(chain.ctx, ast.Load)]
        for chain in sorted(stores, key=depth_of, reverse=True):
            self._put(chain, unfollowed(chain), names)
        for name, line in bound_in(body):
            names[name] = Computed(line, f"def {name} or another statement that names it")
        for name in called_in(body):
            if name in REACH_ALL:
                self._forget_all(names, Computed(line_of(body), f"{name}(...) may change it"))
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
            lose(self._value(node, names), unfollowed(chain), self._step)

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
                elif isinstance(holder, list) and is_place(key, holder):
                    holder[key] = value  # type: ignore[index]
                else:
                    lose(holder, unfollowed(target), self._step)

    def _put_each(self, targets: Sequence[ast.expr], value: Value, names: Names) -> None:
        starred = any(isinstance(own, ast.Starred) for own in targets)
        if isinstance(value, list) and len(value) == len(targets) and not starred:
            for target, own in zip(targets, list(value), strict=True):
                self._put(target, own, names)
            return
        for target in targets:
            lose(value, unfollowed(target), self._step)
            inner = target.value if isinstance(target, ast.Starred) else target
            self._put(inner, value if isinstance(value, Computed) else unfollowed(target), names)

    def _holder(self, node: ast.expr, names: Names) -> Record | list[Any] | None:
        """Return the record or list to which a value is assigned; a computed one is made one."""
        if isinstance(node, ast.Attribute) and node.attr == "__dict__":
            return self._holder(node.value, names)
        found = self._value(node, names)
        if isinstance(found, Computed):
            # The attribute of a computed value is part of this value, which is told once.
            is_part = isinstance(node, ast.Attribute) and found.text == shown(node)
            found = Record(base=None if is_part else found)
            self._put(node, found, names)
        return found if isinstance(found, Record | list) else None
