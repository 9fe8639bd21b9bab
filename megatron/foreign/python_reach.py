"""Finds what Python statements that are not followed may change, assign and return."""

import ast
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

Chain: TypeAlias = ast.Name | ast.Attribute | ast.Subscript

CHANGERS: Final = frozenset(
    {
        *("__setattr__", "__delattr__", "__setitem__", "__delitem__", "__setstate__", "__init__"),
        *("update", "setdefault", "pop", "popitem", "clear"),
    }
)
"""Methods that every object or dict has, and that change it."""

REACH_ALL: Final = frozenset({"exec", "eval", "globals", "locals", "vars"})
"""Functions of Python that may reach every variable by its name; ``vars`` without an argument."""

_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def may_return(body: Sequence[ast.stmt]) -> bool:
    """Return whether statements may end the function in which they stand."""
    left: list[ast.AST] = [*body]
    while left:
        own = left.pop()
        if isinstance(own, ast.Return):
            return True
        if not isinstance(own, _SCOPES):
            left += ast.iter_child_nodes(own)
    return False


def chains_in(nodes: Sequence[ast.AST]) -> Iterator[Chain]:
    """Yield the longest chains of names (``a.b["c"]``) within nodes.

    Of a method's call the object is yielded, which the method may change: ``a.b`` of ``a.b.c()``.
    A chain whose beginning is no name is not yielded, but chains within its beginning are.
    """
    left = [*nodes]
    while left:
        own = left.pop()
        if isinstance(own, ast.Call) and isinstance(own.func, ast.Attribute):
            left += [own.func.value, *own.args, *own.keywords]
        elif isinstance(own, Chain):
            first, inner = _taken_apart(own)
            left += inner
            if isinstance(first, ast.Name):
                yield own
            else:
                left.append(first)
        elif isinstance(own, ast.Compare):  # a comparison neither changes nor shares its sides
            left += [side for side in (own.left, *own.comparators) if not _is_named(side)]
        else:
            left += ast.iter_child_nodes(own)


def _is_named(node: ast.expr) -> bool:
    return isinstance(node, Chain) and is_simple(node) and isinstance(root_of(node), ast.Name)


def _taken_apart(chain: Chain) -> tuple[ast.expr, list[ast.expr]]:
    """Return the beginning of a chain, and the subscripts in it."""
    first: ast.expr = chain
    inner = []
    while isinstance(first, ast.Attribute | ast.Subscript):
        if isinstance(first, ast.Subscript):
            inner.append(first.slice)
        first = first.value
    return first, inner


def is_simple(chain: Chain) -> bool:
    """Return whether the subscripts of a chain are constants or names: its value runs no call."""
    return all(isinstance(own, ast.Constant | ast.Name) for own in _taken_apart(chain)[1])


def root_of(chain: Chain) -> ast.expr:
    """Return the beginning of a chain."""
    return _taken_apart(chain)[0]


def depth_of(chain: Chain) -> int:
    """Return the number of attributes and subscripts of a chain."""
    own: ast.expr = chain
    count = 0
    while isinstance(own, ast.Attribute | ast.Subscript):
        own, count = own.value, count + 1
    return count


def grown_in(nodes: Sequence[ast.AST]) -> set[int]:
    """Return the identities of the targets of ``+=`` and the like, which may change a list."""
    inner = (own for node in nodes for own in ast.walk(node))
    return {id(own.target) for own in inner if isinstance(own, ast.AugAssign)}


def bound_in(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield the names that nodes bind by other statements than assignments, with their lines."""
    for own in (inner for node in nodes for inner in ast.walk(node)):
        match own:
            case (
                ast.FunctionDef(name=str(name), lineno=line)
                | ast.AsyncFunctionDef(name=str(name), lineno=line)
                | ast.ClassDef(name=str(name), lineno=line)
                | ast.ExceptHandler(name=str(name), lineno=line)
                | ast.MatchAs(name=str(name), lineno=line)
                | ast.MatchStar(name=str(name), lineno=line)
                | ast.MatchMapping(rest=str(name), lineno=line)
            ):
                yield name, line
            case ast.alias(name=full, asname=short, lineno=line):
                yield short or full.partition(".")[0], line


def called_in(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the names of functions that nodes call, also of functions of ``builtins``."""
    for own in (inner for node in nodes for inner in ast.walk(node)):
        match own:
            case ast.Call(func=ast.Name(id="vars"), args=[_, *_]):
                pass  # it returns the values of its argument, which the call may change anyway
            case (
                ast.Call(func=ast.Name(id=name))
                | ast.Call(func=ast.Attribute(value=ast.Name(id="builtins"), attr=name))
            ):
                yield name
