"""Small text files that flags name, read within bounds: of ``/dev/zero`` there is no end."""

import json
from pathlib import Path
from typing import Any

from megatron.native.files import read_text


def text_of(flag: str, file: Path) -> str:
    """Return the text of a file that a flag names.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return read_text(file)
    except OSError as error:
        raise ValueError(f"{flag} {file} cannot be read ({error}): give a text file") from error
    except ValueError as error:
        raise ValueError(f"{flag} {file} {error}") from error


def json_of(flag: str, file: Path, remedy: str) -> Any:
    """Return the content of a JSON file that a flag names; ``remedy``: what to do if it is none.

    Raises:
        ValueError: it cannot be read, or is no JSON.
    """
    text = text_of(flag, file)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} {file} is no JSON ({error}): {remedy}") from error
    except RecursionError as error:
        raise ValueError(f"{flag} {file} is nested too deeply: {remedy}") from error
