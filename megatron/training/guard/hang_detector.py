"""Ends a job that cannot go on, and says which rank holds it up.

A thread per rank looks once a second whether its rank has made progress. If it has not for long, or
has lost its connection to another rank, the thread asks all ranks where they are (``roll_call``). A
rank that does not answer has ended, or is stopped. If all answer, and none has made progress for
long, those that wait for nobody hold up the others. In both cases the job ends on all ranks: their
other threads wait in collectives that nobody will complete. A rank that answers from a phase that
may last, such as a save, gets ``LASTING`` times as long.

On CUDA the host runs ahead of the device, so the place of a rank is that of its host.
"""

import os
import sys
import threading
import time
from typing import Final

import torch.distributed as dist

from megatron.parallel.groups import Groups
from megatron.runtime.position import Position
from megatron.training.failure import end_silently, end_with_reason
from megatron.training.guard.places import Place, hang, place_of, table
from megatron.training.guard.roll_call import RollCall, Verdict
from megatron.training.rendezvous import Rendezvous, is_in_reach
from megatron.training.setup import TrainState

LASTING: Final = 48
"""How many times as long as others a phase may take that shows no progress: 4 hours by default."""

POLL_SECONDS: Final = 1.0
"""How often the thread looks."""

LOST_ANSWER, SLOW_ANSWER = 10.0, 60.0
"""Seconds that a rank has to answer: after a lost connection, and at most without one.

A thread may have to wait for its turn while another one holds Python's lock for long."""


class HangDetector:
    """Watches this rank in a thread of its own, from ``start`` to the end of the process.

    After so many ``seconds`` without progress a rank asks the others.
    """

    def __init__(self, rendezvous: Rendezvous, seconds: float) -> None:
        self._position = Position()
        self._groups: Groups | None = None
        self._size = rendezvous.size
        self._seconds = seconds
        self._rendezvous = rendezvous
        self._lost = threading.Event()
        self._is_alone = False
        self._parent = os.getppid()
        self._seen: tuple[object, ...] = ()
        self._since = self._next_call = time.monotonic()

    def start(self) -> None:
        """Start to watch."""
        threading.Thread(target=self.watch, name="hang detector", daemon=True).start()

    def follow(self, state: TrainState) -> None:
        """Follow the position of the rank, which is connected now."""
        self._groups = state.groups
        self._position = state.pipeline.position

    def find_lost(self) -> float:
        """Ask at once who is lost, as this rank has lost a connection.

        Returns:
            Seconds after which the answer is there: the process ends before if a rank is lost.
        """
        self._lost.set()
        return 0.0 if self._is_alone else 2 * POLL_SECONDS + 3 * LOST_ANSWER

    def watch(self) -> None:
        """Look again and again; what the thread does."""
        try:
            self._rendezvous = self._rendezvous.reconnected()
            roll_call = RollCall(self._rendezvous)
            while True:
                self.look(roll_call)
        except dist.DistError:  # the host of the store has ended
            self._is_alone = True
        while True:
            self._look_alone()

    def look(self, roll_call: RollCall) -> None:
        """Answer if a rank has called, or call if this rank cannot go on; one turn."""
        time.sleep(POLL_SECONDS)
        if self._store_has_ended():
            raise dist.DistError("torchrun has ended, and the store with it")
        if not roll_call.is_called():
            if not self._asks():
                return
            if roll_call.call():
                self._conclude(roll_call)
                return
        roll_call.answer(self._place())
        self._obey(roll_call.hear(2 * SLOW_ANSWER))

    def _store_has_ended(self) -> bool:
        """Whether the store is gone with the torchrun of this rank.

        The rank may still save. To ask a store that is gone prints 20 lines of C++ before that.
        """
        orphaned = os.getppid() != self._parent and dist.is_torchelastic_launched()
        return orphaned and self._rendezvous.connect is not None and not is_in_reach()

    def _asks(self) -> bool:
        """Whether this rank has a reason to call, and has not done so just now."""
        now, place = time.monotonic(), self._place()
        if not self._lost.is_set() and (place.idle < self._seconds or now < self._next_call):
            return False
        self._next_call = now + self._seconds / 4
        return True

    def _place(self) -> Place:
        progress, now = self._position.progress, time.monotonic()
        if progress != self._seen:
            self._seen, self._since = progress, now
        gives_up = self._seconds * (LASTING if self._position.may_last else 1)
        return place_of(self._position, self._groups, now - self._since, gives_up)

    def _conclude(self, roll_call: RollCall) -> None:
        """Collect the answers, and end the job if it cannot go on."""
        roll_call.answer(self._place())
        patience = LOST_ANSWER if self._lost.is_set() else max(LOST_ANSWER, self._seconds)
        places, machine = roll_call.places(min(patience, SLOW_ANSWER)), _machine()
        reason = hang(places, self._size)
        self._lost.clear()
        if not reason:
            roll_call.conclude(Verdict())
            return
        first = self._rendezvous.takes_the_word()
        roll_call.conclude(Verdict(reason, machine, is_told=not first))
        if not first:
            end_silently(1)
        print(*table(places, self._size), sep="\n", file=sys.stderr, flush=True)
        end_with_reason(f"error: {reason}")

    def _obey(self, verdict: Verdict) -> None:
        """End this rank if the job cannot go on; one rank says why, and one on each other machine.

        torchrun reports a failure of its own machine only; ranks that end without a fault beside
        the one that speaks are not in the report.
        """
        self._lost.clear()
        if not verdict.reason:
            return
        if verdict.machine == _machine() and not verdict.is_told:
            end_silently(0)
        end_with_reason(f"error: {verdict.reason}")

    def _look_alone(self) -> None:
        """Without the store: give up after the time, and say where this rank is."""
        time.sleep(POLL_SECONDS)
        place = self._place()
        if place.idle >= place.gives_up:
            end_with_reason(
                f"error: [rank {self._rendezvous.rank}] {place}; the store of the job is out of "
                "reach, so nothing is known of the other ranks"
            )


def _machine() -> str:
    """Return the name of torchrun's group of ranks that this one belongs to."""
    return os.environ.get("GROUP_RANK", "")
