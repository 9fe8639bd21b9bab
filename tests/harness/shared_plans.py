"""The processes of a test run search every plan once.

A search is a function of its request alone and has tests of its own; in a test of what ranks
compute, every rank would repeat it, which takes several times as long as the computing.
"""

import fcntl
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final
from unittest.mock import patch

from megatron.schedules import make_plan
from megatron.schedules.make_plan import Found
from megatron.schedules.request import Request
from megatron.schedules.search.watch import Watch

_FOLDER: Final = "TESTS_SHARED_PLANS"
_search = make_plan._found


def open_folder() -> Path | None:
    """Make the folder of a test run; ``None`` in a process that a run with one has started."""
    if _FOLDER in os.environ:
        return None
    folder = tempfile.mkdtemp(prefix="shared_plans_")
    os.environ[_FOLDER] = folder
    return Path(folder)


def close_folder(folder: Path) -> None:
    """Remove what ``open_folder`` has made."""
    del os.environ[_FOLDER]
    shutil.rmtree(folder)


@contextmanager
def shared_plans() -> Iterator[None]:
    """Let plans be those of the folder, if there is one; what it lacks is searched first."""
    folder = os.environ.get(_FOLDER)
    if folder is None:
        yield
        return
    with patch.object(make_plan, "_found", lambda *of: _shared(Path(folder), *of)):
        yield


def _shared(folder: Path, request: Request, watch: Watch) -> Found:
    if request.schedule in ("file", "optimal") or watch.seconds is not None:
        return _search(request, watch)  # depends on the file, or on the time
    path = folder / sha256(pickle.dumps(request)).hexdigest()
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # whoever else wants it waits for it
        file.seek(0)
        if held := file.read():
            found: Found = pickle.loads(held)
            return found
        found = _search(request, watch)
        file.write(pickle.dumps(found))
        return found
