"""Digests of the code that a rank runs: its sources, and the versions of packages that compute.

Ranks on several machines may have several copies of the code. A rank with another formula trains
on, and no number tells.
"""

import hashlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Final

PACKAGES: Final = ("torch", "numpy", "triton", "transformer-engine", "flash-attn")
"""Packages whose versions may change numbers."""

SOURCES: Final = "sources"
"""Name of the digest of all sources together."""

_OF_VERSION: Final = "version of "
_SOURCES_AND_DATA: Final = ("*.py", "*.cpp", "table.txt")
"""Patterns of the files that a wheel brings into a room (``setup.py``), besides ``_TYPED``."""

_TYPED: Final = "py.typed"
"""A file in every room of this package. Rooms of Megatron-Core, which may lie beside them, lack it.
"""

_ROOT: Final = Path(__file__).resolve().parents[1]


def code_digests() -> dict[str, str]:
    """Return the versions of packages in plain text, and one digest of all sources."""
    found = {f"{_OF_VERSION}{name}": _version(name) for name in PACKAGES}
    digest = hashlib.sha256(repr(sorted(digests_of_files().items())).encode())
    return {
        f"{_OF_VERSION}python": platform.python_version(),
        **found,
        SOURCES: digest.hexdigest()[:16],
    }


def is_version(name: str) -> bool:
    """Return whether a digest is a version in plain text."""
    return name.startswith(_OF_VERSION)


def digests_of_files(root: Path = _ROOT) -> dict[str, str]:
    """Return a digest of every source in a folder of rooms, and of the script that runs.

    Files of the rooms are named from the folder above ``root``. Editors keep notes and copies under
    names that begin with a dot; such files and folders do not count.
    """
    rooms = sorted(path.parent for path in root.glob(f"*/{_TYPED}"))
    digests = {
        str(path.relative_to(root.parent)): _digest(path) for room in rooms for path in _files(room)
    }
    found = {name: digest for name, digest in digests.items() if digest is not None}
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if script.suffix == ".py" and (digest := _digest(script)) is not None:
        found[script.name] = digest
    return found


def unlike_files(by_rank: list[Mapping[str, str]]) -> str:
    """Return, in words, the first file that differs from rank 0's on each rank."""
    found = []
    for rank, own in enumerate(by_rank):
        names = sorted(
            name for name in by_rank[0].keys() | own.keys() if own.get(name) != by_rank[0].get(name)
        )
        if names:
            more = f" and {len(names) - 1} other files" if len(names) > 1 else ""
            found.append(f"rank {rank} has another {names[0]}{more}")
    return "; ".join(found)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _files(room: Path) -> Iterator[Path]:
    """Yield the paths in a room that may be sources or data of the package."""
    for folder, below, names in os.walk(room):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            fits = any(fnmatchcase(name, pattern) for pattern in _SOURCES_AND_DATA)
            if fits and not name.startswith("."):
                yield Path(folder, name)


def _digest(path: Path) -> str | None:
    """Return the digest of a file; ``None``: there is no file, or it has gone meanwhile."""
    if not path.is_file():
        return None
    with suppress(FileNotFoundError):
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return None
