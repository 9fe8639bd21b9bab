"""Reads small text files that flags name, up to a limit, as ``/dev/zero`` would never end."""

import json
from pathlib import Path
from typing import Any

from megatron.native.files import read_text


def text_of(flag: str, file: Path) -> str:
    """Return the text of a file that a flag names.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        return read_text(file)
    except OSError as error:
        raise ValueError(f"{flag} {file} cannot be read ({error}): give a text file") from error
    except ValueError as error:
        raise ValueError(f"{flag} {file} {error}") from error


def json_of(flag: str, file: Path, remedy: str) -> Any:
    """Return the content of a JSON file that a flag names.

    Args:
        flag: the flag, for messages.
        file: the file.
        remedy: way out for a user whose file is no JSON.

    Raises:
        ValueError: the file cannot be read, or is no JSON.
    """
    text = text_of(flag, file)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} {file} is no JSON ({error}): {remedy}") from error
    except RecursionError as error:
        raise ValueError(f"{flag} {file} is nested too deeply: {remedy}") from error
