"""Operations on known values of a Python file that is read as data, and words for other values."""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from megatron.foreign.python_values import Computed, Record, Value

_LARGEST: Final = 1 << 63
_LONGEST: Final = 100

DTYPES: Final = {
    "torch.float32": "fp32", "torch.float": "fp32", "torch.bfloat16": "bf16",
    "torch.float16": "fp16", "torch.half": "fp16",
}  # fmt: skip
"""PyTorch's types of numbers, and their words."""

SUMS: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
COMPARED: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_HARMLESS: Final = frozenset(
    {
        *("print", "len", "isinstance", "str", "int", "float", "bool", "min", "max", "abs"),
        *("round", "repr", "range"),
    }
)
"""Functions of Python that change none of their arguments."""


def of_two(operation: Callable[[Any, Any], Any], both: Sequence[Value]) -> Value:
    """Return the result of an operation on two numbers; ``None``: they are none, or too large."""
    if not all(isinstance(own, int | float) and not isinstance(own, bool) for own in both):
        return None
    try:
        found: int | float = operation(*both)
    except (ArithmeticError, ValueError):
        return None
    return found if abs(found) < _LARGEST else None


def compared(sign: type[ast.cmpop], both: Sequence[Value]) -> bool | None:
    """Return the result of a comparison; ``None``: it is not known."""
    is_none = sign in (ast.Is, ast.IsNot) and None in both
    known = list | Record if is_none else None
    if not all(isinstance(own, bool | int | float | str | None | known) for own in both):
        return None
    try:
        return COMPARED[sign](*both)
    except TypeError:
        return None


def literal(text: str) -> Value:
    """Return the value of a word of the command line: a number, True, False, None, or a text."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return text
    return found if isinstance(found, bool | int | float | str | None) else text


def is_harmless(call: ast.Call) -> bool:
    """Return whether a call changes none of its arguments."""
    return isinstance(call.func, ast.Name) and call.func.id in _HARMLESS and not call.keywords


def is_place(key: Value, values: Sequence[Value]) -> bool:
    """Return whether a key is that of a value of a list."""
    return type(key) is int and -len(values) <= key < len(values)


def unfollowed(node: ast.expr) -> Computed:
    """Return the value of a chain of names that a statement may change which is not followed."""
    return Computed(node.lineno, "... (may be changed by this line, which is not followed)")


def line_of(body: Sequence[ast.AST]) -> int:
    """Return the number of the line of the first node that has one."""
    return next((node.lineno for node in body if isinstance(node, ast.stmt | ast.expr)), 0)


def head(node: ast.stmt) -> str:
    """Return the beginning of a statement, of one with a block without the block."""
    text = shown(node)
    return text.partition(":")[0] if isinstance(node, ast.If | ast.For) else text


def shown(node: ast.AST) -> str:
    """Return the beginning of an expression in one line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
