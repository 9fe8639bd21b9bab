"""Ends a job that cannot go on, and says which rank holds it up.

A thread per rank looks once a second whether its rank has made progress. If the rank has made no
progress for long, or has lost its connection to another rank, the thread asks all ranks where they
are (``roll_call``). A rank that does not answer has ended, or is stopped. If all ranks answer, but
none has made progress for long, the ranks that wait for nobody hold up the others. In both cases
the job ends on all ranks: their main threads wait in collectives that will never complete. A rank
in a phase that may take long, such as a save, gets ``LASTING`` times as long. Where no torchrun
watches the processes, a rank's death is known sooner (``neighbours``).

On CUDA the host runs ahead of the device. A rank that answers asks its GPU for its place, and
PyTorch's flight recorder for the collectives that the rank has entered (``entered``).
"""

import os
import sys
import threading
import time
from typing import Final

import torch.distributed as dist

from megatron.parallel.groups import Groups
from megatron.runtime.position import END_OF_SAVE, Position
from megatron.training.failure import end_silently, end_with_reason
from megatron.training.guard.neighbours import Neighbours
from megatron.training.guard.places import Place, hang, place_of, table
from megatron.training.guard.roll_call import RollCall, Verdict
from megatron.training.rendezvous import Rendezvous, is_in_reach
from megatron.training.setup import TrainState

LASTING: Final = 48
"""Factor on the time without progress for phases that may take long: 4 hours by default."""

POLL_SECONDS: Final = 1.0
"""Seconds between two looks of the thread."""

LOST_ANSWER, SLOW_ANSWER = 10.0, 60.0
"""Seconds that a rank has to answer: after a lost connection, and the most in all other cases.

The answer may come late, because another thread of the rank can hold Python's lock for long."""


class HangDetector:
    """Watches this rank in a thread of its own, from ``start`` to the end of the process.

    After ``seconds`` without progress a rank asks the others. ``neighbours`` watch for dead ranks.
    """

    def __init__(
        self, rendezvous: Rendezvous, seconds: float, neighbours: Neighbours | None = None
    ) -> None:
        self._neighbours = neighbours or Neighbours(rendezvous)
        self._neighbours.ends_a_save = lambda: self._position.phase == END_OF_SAVE
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
        """Follow the position of the rank in its program, once the ranks are connected."""
        self._groups = state.groups
        self._position = state.pipeline.position

    def find_lost(self) -> float:
        """Ask at once which rank is lost, because this rank has lost a connection.

        Returns:
            Seconds to wait for the answer. If a rank is lost, this process ends before that.
        """
        if self._neighbours.another_told:
            self._neighbours.take_leave("left")  # or its neighbours would say that it is lost
            end_silently(1)
        self._lost.set()
        is_watched = self._neighbours.lost is not None or self._neighbours.is_linked
        return 0.0 if self._is_alone and not is_watched else 2 * POLL_SECONDS + 3 * LOST_ANSWER

    def watch(self) -> None:
        """Look again and again: the work of the thread."""
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
        """Do one turn: answer if a rank has called, or call if this rank cannot go on."""
        time.sleep(POLL_SECONDS)
        if self._neighbours.lost is not None:  # they end this process, and maybe the store's
            return
        if self._store_has_ended():
            raise dist.DistError("the process with the store has ended")
        if not roll_call.is_called():
            if not self._asks():
                return
            if roll_call.call():
                self._conclude(roll_call)
                return
        roll_call.answer(self._place())
        self._obey(roll_call.hear(2 * SLOW_ANSWER))

    def _store_has_ended(self) -> bool:
        """Whether the store is gone with rank 0, or with the torchrun of this rank.

        The rank may still save. A request to a missing store would print 20 lines of C++, so this
        check comes first.
        """
        if self._neighbours.store_has_ended:
            return True
        orphaned = os.getppid() != self._parent and dist.is_torchelastic_launched()
        return orphaned and self._rendezvous.connect is not None and not is_in_reach()

    def _asks(self) -> bool:
        """Whether this rank has a reason to call, and its last call is not too recent."""
        now, idle = time.monotonic(), self._idle()
        if not self._lost.is_set() and (idle < self._seconds or now < self._next_call):
            return False
        self._next_call = now + self._seconds / 4
        return True

    def _idle(self) -> float:
        """Return the seconds for which the host of this rank has made no progress."""
        progress, now = self._position.progress, time.monotonic()
        if progress != self._seen:
            self._seen, self._since = progress, now
        return now - self._since

    @property
    def _gives_up(self) -> float:
        """Seconds without progress after which this rank gives up."""
        return self._seconds * (LASTING if self._position.may_last else 1)

    def _place(self) -> Place:
        """Return the place of this rank; its GPU and the flight recorder are asked."""
        return place_of(self._position, self._groups, self._idle(), self._gives_up)

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
        """End this rank if the job cannot go on.

        The caller of the roll call tells the reason. The other ranks of its machine end without a
        fault, so that torchrun's report does not list them. The ranks of other machines tell the
        reason too, because torchrun reports failures of its own machine only.
        """
        self._lost.clear()
        if not verdict.reason:
            return
        if verdict.machine == _machine() and not verdict.is_told:
            end_silently(0)
        end_with_reason(f"error: {verdict.reason}")

    def _look_alone(self) -> None:
        """Watch without the store: when the time is up, end and say where this rank is."""
        time.sleep(POLL_SECONDS)
        if self._idle() >= self._gives_up:
            end_with_reason(
                f"error: [rank {self._rendezvous.rank}] {self._place()}; the store of the job is "
                "out of reach, so nothing is known of the other ranks"
            )


def _machine() -> str:
    """Return the name of torchrun's group of ranks that this rank belongs to."""
    return os.environ.get("GROUP_RANK", "")
