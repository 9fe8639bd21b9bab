"""Ends a rank that cannot go on; one rank tells the reason, as the last words on the screen.

torchrun ends all ranks as soon as one rank has failed. Then torchrun prints its own traceback and a
report. The report ends with the text in the *error file* of the rank that failed first
(``torch.distributed.elastic.multiprocessing.errors``). So under torchrun the reason goes into the
error file, and otherwise to standard error. One rank speaks, and the other ranks *leave the word*
to it: they wait until torchrun ends them, and end without a fault, so that the report does not list
them.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import torch.distributed as dist

from megatron.flags.readable import as_error
from megatron.parallel.environment import local_world_size
from megatron.training.exit_signals import was_terminated
from megatron.training.rendezvous import DriftError, Rendezvous, UserError

T = TypeVar("T")

_SILENT: Final = "silent"
"""Name of a file beside a rank's error file; the file says that the rank leaves the word."""

SILENT_SECONDS: Final = 5.0
"""How long a rank waits for another rank to say why the job ends."""

GRACE_SECONDS: Final = 1.0
"""How long torchrun has to find a dead rank; it looks ten times a second."""


def or_exit(
    work: Callable[[], T], rank: int, local_rank: int = 0, silent_seconds: float = SILENT_SECONDS
) -> T:
    """Return the result of ``work``; a user's mistake ends the process without a traceback.

    Usually every rank finds the same mistakes, and rank 0 speaks. If rank 0 finds no mistake,
    because a file is missing only on another machine, the first rank of that machine speaks. If
    that rank finds no mistake either, other ranks speak.

    Args:
        work: every rank does it for itself, before the ranks have met.
        rank: this rank.
        local_rank: number of this rank on its machine.
        silent_seconds: how long a rank waits for ranks that speak before it.

    Raises:
        SystemExit: with 2 if ``work`` raised a ``ValueError`` or ``OSError``.
    """
    try:
        return work()
    except (ValueError, OSError) as error:
        reason = as_error(error)
    if rank > 0:
        leave_the_word(silent_seconds * (2 if local_rank else 1))
        reason = f"[rank {rank}] {reason}"
    say(reason)
    _let_others_be_silent(silent_seconds)
    sys.exit(2)


def end_the_job(
    rendezvous: Rendezvous,
    error: Exception,
    find_lost: Callable[[], float] | None = None,
    take_leave: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Say why the job ends, and end this process at once: 2 for a user's mistake, else 1.

    A rank that fails must not linger in a collective that the others will never join. If several
    ranks fail, one of them speaks. If all ranks fail because one rank has died without a word,
    torchrun reports the dead rank, and ends the other ranks before they speak. The torchrun of
    another machine does not know of the dead rank; there the ranks ask which rank is lost.

    Args:
        rendezvous: where the ranks have met.
        error: a user's mistake, a diverged loss or different copies of a weight, which all ranks
            may find, are told in one line; any other failure with its traceback.
        find_lost: begins to ask which rank is lost, and returns the seconds to wait for the answer.
            If a rank is lost, this process ends during the wait (see ``HangDetector``).
        take_leave: tells other ranks that this one has said why the job ends.
    """
    in_one_line = isinstance(error, (FloatingPointError, UserError, DriftError))
    if find_lost is not None and is_lost_connection(error):
        _leave_the_word_to_torchrun(find_lost())
    if not _takes_the_word(rendezvous, otherwise=not in_one_line):
        _leave_the_word_to_torchrun(SILENT_SECONDS)
    elif in_one_line:
        say(as_error(error))
    else:
        leave_the_word(GRACE_SECONDS)
        trace = "".join(traceback.format_exception(error))
        print(f"[rank {rendezvous.rank}] failed:\n{trace}", end="", file=sys.stderr, flush=True)
        tell_torchrun(trace)
    take_leave()
    os._exit(2 if isinstance(error, UserError) else 1)


def is_lost_connection(error: Exception) -> bool:
    """Return whether an error says only that another rank is gone, without the reason."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )


def end_with_reason(reason: str) -> NoReturn:
    """Say why the job ends, and end this process at once; any thread may call it."""
    say(reason)
    _let_others_be_silent(GRACE_SECONDS)
    os._exit(1)


def end_silently(code: int) -> NoReturn:
    """End this process at once, because another rank tells the reason; any thread may call it."""
    _be_silent()
    os._exit(code)


def say(reason: str) -> None:
    """Leave ``reason`` for torchrun's report; print it if torchrun did not start this rank."""
    if not tell_torchrun(reason):
        print(reason, file=sys.stderr, flush=True)


def tell_torchrun(reason: str) -> bool:
    """Write this rank's error file; return whether torchrun will report it."""
    file = _error_file()
    if file is None:
        return False
    try:
        file.write_text(_report(reason, str(int(time.time()))))
    except OSError:
        return False
    return True


def form_of_report() -> tuple[bytes, bytes] | None:
    """Return this rank's error file, and its content for a handler of signals to complete.

    Returns:
        The path, and the content with the byte 1 for the reason and the byte 2 for the seconds
        since 1970; ``None``: torchrun did not start this rank.
    """
    file = _error_file()
    if file is None:
        return None
    reason, seconds = "\1", "\2"
    form = _report(reason, seconds)
    for mark in (reason, seconds):
        form = form.replace(json.dumps(mark)[1:-1], mark)
    return os.fsencode(file), form.encode()


def _report(reason: str, seconds: str) -> str:
    """Return the content of an error file; torchrun prints the "call stack", not the message."""
    extra = {"py_callstack": f"\n{reason}", "timestamp": seconds}
    return json.dumps({"message": {"message": reason, "extraInfo": extra}})


def leave_the_word(seconds: float) -> None:
    """Wait until torchrun ends this rank, because another has failed; return after ``seconds``."""
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    _be_silent()
    try:
        time.sleep(seconds)
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave_the_word_to_torchrun(seconds: float) -> None:
    """Leave the word; end at once if torchrun's signal came before, and was only noted."""
    if was_terminated():
        end_silently(0)
    leave_the_word(seconds)


def _be_silent() -> None:
    """Tell the other ranks of this machine that this rank leaves the word to them."""
    if (file := _error_file()) is not None:
        with suppress(OSError):  # then the speaker waits in vain, and ends
            (file.parent / _SILENT).touch()


def _let_others_be_silent(seconds: float) -> None:
    """Wait until the other ranks of this machine are ready to be ended without a fault.

    If torchrun ends a rank that has not come so far, the report lists that rank.
    """
    file = _error_file()
    if file is None:
        return
    ranks = range(local_world_size())
    others = [file.parent.parent / str(r) / _SILENT for r in ranks if str(r) != file.parent.name]
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(other.exists() for other in others):
        time.sleep(0.05)


def _error_file() -> Path | None:
    """Return this rank's error file under torchrun; its folder lies beside other ranks' folders."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file) if file is not None and dist.is_torchelastic_launched() else None


def _takes_the_word(rendezvous: Rendezvous, otherwise: bool) -> bool:
    try:
        return rendezvous.takes_the_word()
    except dist.DistError:  # the rank that hosted the store has ended
        return otherwise
