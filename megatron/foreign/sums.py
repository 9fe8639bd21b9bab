"""Computes $((...)) for whole numbers, as far as a reader knows them."""

import ast
import re
import warnings
from collections.abc import Callable
from typing import Final

_NAMES: Final = re.compile(r"\$\{?([A-Za-z_]\w*|[0-9])\}?", re.ASCII)
_ALLOWED: Final = re.compile(r"[\w\s()+\-*/%<>=!&|]*")
_CHOICE: Final = re.compile(r"([^?:]+)\?([^?:]+):([^?:]+)")
_LARGEST: Final = 2**63
_NUMBER: Final = re.compile(r"0|[1-9]\d*|0[xX][0-9a-fA-F]+", re.ASCII)
"""Numbers that are written as in Python; a number that begins with 0 is octal to the shell."""

_ASSIGNS: Final = re.compile(
    r"(?:\+\+|--)\s*([A-Za-z_]\w*)|"
    r"([A-Za-z_]\w*)\s*(?:\[[^\]]{0,99}\]\s*)?(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))",
    re.ASCII,
)
_ONE_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", re.ASCII | re.DOTALL)
_COUNTED: Final = re.compile(r"([A-Za-z_]\w*)\s*(\+\+|--)|(\+\+|--)\s*([A-Za-z_]\w*)", re.ASCII)
_NOT: Final = re.compile(r"!(?!=)")
_PLAIN_NOT: Final = re.compile(r"!\s*\w+\s*(?=$|&&|\|\||\))")


def assigned_by(text: str) -> list[str]:
    """Return the variables that an expression may assign."""
    return [before or behind for before, behind in _ASSIGNS.findall(text)]


def assignment_of(text: str) -> tuple[str, str] | None:
    """Return the variable and the new value of an expression that is one assignment, else nothing.

    The new value is an expression without assignments.
    """
    if found := _COUNTED.fullmatch(text.strip()):
        name, sign = found[1] or found[4], (found[2] or found[3])[0]
        return name, f"{name} {sign} 1"
    found = _ONE_ASSIGNMENT.fullmatch(text.strip())
    if found is None or assigned_by(found[3]) or "," in found[3]:
        return None
    name, sign, value = found.groups()
    return name, f"({name}) {sign} ({value})" if sign else value


def value_of_sum(text: str, value_of: Callable[[str], int | None]) -> int | None:
    """Return the value of an expression.

    Args:
        text: the expression, in the language of the shell.
        value_of: the value of a variable, 0 if it is not set; ``None``: it is not known.

    Returns:
        The value; ``None``: a variable is not known, or the expression is none of those that are
        computed here.
    """
    plain = _NAMES.sub(r" \1 ", text).strip()
    if choice := _CHOICE.fullmatch(plain):
        holds = value_of_sum(choice[1], value_of)
        return None if holds is None else value_of_sum(choice[2 if holds else 3], value_of)
    if not _ALLOWED.fullmatch(plain) or not _reads_alike(plain):
        return None
    written = plain.replace("&&", " and ").replace("||", " or ").replace("/", "//")
    written = re.sub(r"!(?!=)", " not ", written)
    try:
        with warnings.catch_warnings():  # Python warns of some texts that are no sums of its own
            warnings.simplefilter("ignore")
            tree = ast.parse(written or "0", mode="eval")
        return _value(tree.body, value_of)
    except (ArithmeticError, SyntaxError, ValueError, MemoryError, RecursionError, _UnknownError):
        return None


def _reads_alike(text: str) -> bool:
    """Return whether an expression has nothing that Python reads in another way than the shell."""
    numbers = re.findall(r"(?<!\w)\d\w*", text)
    return (
        all(map(_NUMBER.fullmatch, numbers))
        and not re.search(r"\+\+|--", text)
        and not ("**" in text and "-" in text)
        and len(_NOT.findall(text)) == len(_PLAIN_NOT.findall(text))
    )


class _UnknownError(Exception):
    """A value that is not known, or an expression that is not computed."""


def _value(node: ast.expr, value_of: Callable[[str], int | None]) -> int:
    """Return the value of a part of an expression."""
    match node:
        case ast.Constant(value=int(number)):
            found: int | None = number
        case ast.Name(id=name):
            found = value_of(name)
        case ast.UnaryOp(op=ast.USub(), operand=own):
            found = -_value(own, value_of)
        case ast.UnaryOp(op=ast.Not(), operand=own):
            found = int(not _value(own, value_of))
        case ast.BoolOp(op=ast.And(), values=parts):
            found = int(all(_value(part, value_of) for part in parts))
        case ast.BoolOp(op=ast.Or(), values=parts):
            found = int(any(_value(part, value_of) for part in parts))
        case ast.BinOp(left=left, op=own_op, right=right):
            found = _joined(own_op, _value(left, value_of), _value(right, value_of))
        case ast.Compare(left=left, ops=[own_compare], comparators=[right]):
            found = _compared(own_compare, _value(left, value_of), _value(right, value_of))
        case _:
            found = None
    if found is None or abs(found) >= _LARGEST:
        raise _UnknownError
    return found


def _joined(operator: ast.operator, left: int, right: int) -> int | None:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv():  # the shell rounds towards zero
            return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        case ast.Mod():
            return abs(left) % abs(right) * (-1 if left < 0 else 1)
        case ast.Pow() if 0 <= right < 64:
            return int(left**right)
    return None


def _compared(operator: ast.cmpop, left: int, right: int) -> int | None:
    match operator:
        case ast.Eq():
            return int(left == right)
        case ast.NotEq():
            return int(left != right)
        case ast.Lt():
            return int(left < right)
        case ast.LtE():
            return int(left <= right)
        case ast.Gt():
            return int(left > right)
        case ast.GtE():
            return int(left >= right)
    return None
