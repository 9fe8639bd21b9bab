"""Opens a tokenizer's files and libraries, and says which flag to mend where that fails."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron.native.files import LARGEST_TEXT, read_text


def library(name: str, asker: str) -> Any:
    """Import a Python package that only some inputs need.

    Args:
        name: the package, or a module of it.
        asker: the flag with its value, or the file, that needs the package.

    Raises:
        ValueError: the package is not installed.
    """
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ValueError(
            f"{asker} needs the Python package {package}: pip install {package}"
        ) from error


@contextmanager
def package_errors(package: str, subject: str = "") -> Iterator[None]:
    """Turn every error of a package's encoder into a ``ValueError``.

    An encoder in Rust gives up by a panic, for example where a regular expression tries too many
    ways to match. Python's name for a panic is no ``Exception``, and cannot be sent to another
    process.

    Args:
        package: name of the package.
        subject: beginning of the message.

    Raises:
        ValueError: the block has raised an error of the package.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{subject}makes the package {package} give up ({error})") from error


def needed(flag: str, path: Path | None, tokenizer_type: str | None, what: str) -> Path:
    """Return the file that a flag names; messages call it ``what``, as in "needs {what}".

    Raises:
        ValueError: the flag is missing, or names no file or too large a file.
    """
    if path is None:
        raise ValueError(f"{flag} is missing: --tokenizer-type {tokenizer_type} needs {what}")
    if not path.is_file():
        raise ValueError(f"{flag} {path} is not a file; give {what}")
    if path.stat().st_size > LARGEST_TEXT:  # the packages read a file whole
        raise ValueError(f"{flag} {path} has more than {LARGEST_TEXT:,} bytes; give {what}")
    return path


def read_json(flag: str, path: Path, what: str) -> Any:
    """Return the content of a JSON file that a flag names.

    Raises:
        ValueError: the file cannot be read, or is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{flag} {path} cannot be read as JSON ({error}); give {what}") from error
