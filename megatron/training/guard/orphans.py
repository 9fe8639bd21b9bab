"""Ends every rank whose torchrun has ended, even if SIGKILL ended torchrun.

The rank gets SIGTERM. With ``--exit-signal-handler`` it saves and leaves; otherwise it dies.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Final

import torch.distributed as dist

_PR_SET_PDEATHSIG: Final = 1
"""Option of Linux's prctl(2) that sets the signal for a process whose parent ends."""

LOOK_SECONDS: Final = 2.0
"""Seconds between two looks for the parent on systems that send no such signal."""


def end_with_torchrun() -> None:
    """Make this process get SIGTERM when torchrun ends; do nothing under other launchers.

    A process that was started by hand may be meant to outlive its shell.
    """
    if not dist.is_torchelastic_launched():
        return
    parent = os.getppid()
    if sys.platform != "linux" or not _ask_kernel():
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
    elif os.getppid() != parent:  # torchrun has ended in between
        os.kill(os.getpid(), signal.SIGTERM)


def _ask_kernel() -> bool:
    """Ask Linux to send the signal; return whether Linux accepts."""
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):  # another C library
        return False
    return bool(prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) == 0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
