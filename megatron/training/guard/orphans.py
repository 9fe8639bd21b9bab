"""Lets no rank live on when the torchrun that has started it is gone, even by SIGKILL.

A rank then gets SIGTERM. It dies of it, or saves and leaves with ``--exit-signal-handler``.
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
"""Of Linux's prctl(2): the signal that a process gets when its parent ends."""

LOOK_SECONDS: Final = 2.0
"""How often a rank looks for its parent where there is no such signal."""


def end_with_torchrun() -> None:
    """Make this process get SIGTERM when torchrun ends; a rank of another launcher stays as it is.

    A process that was started by hand may be meant to outlive its shell.
    """
    if not dist.is_torchelastic_launched():
        return
    parent = os.getppid()
    if sys.platform != "linux" or not _ask_kernel():
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
    elif os.getppid() != parent:  # it has ended in between
        os.kill(os.getpid(), signal.SIGTERM)


def _ask_kernel() -> bool:
    """Ask Linux for the signal; return whether it will send it."""
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):  # another C library
        return False
    return bool(prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) == 0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
