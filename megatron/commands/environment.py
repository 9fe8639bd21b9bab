"""How a command imports its packages: a message if Python lacks one, and no search for garbage."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def in_environment() -> Iterator[None]:
    """Guard imports of packages: if a package is missing, end with a line that names the remedy.

    A missing module of this project raises ``ModuleNotFoundError`` as usual. Imports make a million
    objects and no garbage. So the collector pauses, and later collections skip these objects.

    Raises:
        SystemExit: with 1 and the line.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    except ModuleNotFoundError as missing:
        package = (missing.name or "megatron").split(".")[0]
        if package in ("megatron", "tools"):
            raise
        sys.exit(
            f"error: {sys.executable} has no module {package}: bash tools/setup_venv.sh makes the "
            "environment .venv (once), and source .venv/bin/activate enters it"
        )
    finally:
        if collects:
            gc.freeze()
            gc.enable()
