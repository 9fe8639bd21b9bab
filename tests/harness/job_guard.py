"""Ends the jobs that tests start, whatever happens to the tests."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import AnyStr


@contextmanager
def guarded(job: subprocess.Popen[AnyStr]) -> Iterator[subprocess.Popen[AnyStr]]:
    """Kill a job with all its processes at the end of the context, if it still runs.

    Args:
        job: was started in a session of its own.
    """
    try:
        yield job
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
