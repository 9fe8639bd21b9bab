"""Whether an optional package has the functions that are called, with the arguments they get."""

import inspect
import re
from collections.abc import Collection, Mapping
from typing import Any


def fault_of_names(used: Mapping[str, str], called: Mapping[str, Any]) -> str | None:
    """Return a line about the first missing function or arguments; ``None``: all are there.

    Args:
        used: the functions by name, each with the names of the arguments that it gets.
        called: the functions that were found, by the same names; ``None``: it was not found.
    """
    for name, arguments in used.items():
        if called[name] is None:
            return f"its {name} is missing"
        known = arguments_of(called[name])
        lacks = [argument for argument in arguments.split() if argument not in known]
        if lacks:
            return f"its {name} has no {', '.join(lacks)}"
    return None


def arguments_of(function: Any) -> Collection[str]:
    """Return the names of a function's arguments.

    Compiled functions have no signature for ``inspect``. Their documentation begins with one.
    """
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        first, *_ = (function.__doc__ or "").splitlines() or [""]
        return set(re.findall(r"[(,]\s*(\w+)\s*:", first))
