"""Predictions that are kept in files, so that a long series of them can be ended and gone on with.

A file holds one prediction and a digest of the code that made it. A prediction of other code is
made anew.
"""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args, get_origin, get_type_hints

ROOT: Final = Path(__file__).resolve().parents[2]
_SOURCES: Final = ("megatron", "tools/predictions")


def kept(folder: Path | None, name: str, kind: Any, predict: Callable[[], Any]) -> Any:
    """Return a prediction, from its file if this code has made it before.

    Args:
        folder: of the files; ``None``: nothing is kept.
        name: of the prediction; it names the file.
        kind: type of the prediction, as in ``restored``.
        predict: makes the prediction.
    """
    if folder is None:
        return predict()
    file = folder / f"{''.join(c if c.isalnum() else '-' for c in name)}.json"
    code = _digest_of_code()
    if file.exists():
        known = json.loads(file.read_text(encoding="utf-8"))
        if known["code"] == code:
            return restored(kind, known["found"])
    found = predict()
    folder.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"code": code, "found": found}), encoding="utf-8")
    part.replace(file)
    return found


def restored(kind: Any, found: Any) -> Any:
    """Return a value of a type from the JSON of this value.

    Args:
        kind: a NamedTuple of such types, a list or dictionary of them, or one that may be ``None``.
        found: the same as JSON has it, where a NamedTuple is a list.
    """
    parts = get_args(kind)
    if found is None or not (parts or hasattr(kind, "_fields")):
        return found
    if get_origin(kind) is list:
        return [restored(parts[0], own) for own in found]
    if get_origin(kind) is dict:
        return {key: restored(parts[1], own) for key, own in found.items()}
    if parts:  # of a type or None
        return restored(parts[0], found)
    types = get_type_hints(kind).values()
    return kind(*map(restored, types, found))


@cache
def _digest_of_code() -> str:
    """Return a digest of all Python files on which a prediction may depend."""
    found = hashlib.sha256()
    for folder in _SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()
