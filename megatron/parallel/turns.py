"""Two passes take turns on a rank: one works while a collective of the other is under way.

The two passes of a pair have a thread each, but never run at the same time. When a pass has begun a
collective on an axis with ``Turns`` that it waits for, or a reduction, the other pass has its turn.
At its own next turn, the pass waits for its collective, or first does work that does not need it. A
W hands over after each of its products (``divided``), while tensors for the next ones are under
way. After the end of one pass, the other one runs alone. Each pass has exactly the results that it
would have alone.

Between two layers, F and B wait twice with hardly any work between: the sum of a layer's output
leaves, and after a norm the input of the next layer is gathered. If both passes of a pair were at
this place at the same time, nothing would hide their collectives. So such passes also hand over
between the two products of a layer (``pause``), and the second pass stays one turn behind:

    first    b, sum leaves           norm, gathers             a                          b, ...
    second                  a                 b, sum leaves       norm, gathers   ...

Here a is the work up to the pause and b the work after it. Each collective is under way during an a
or a b of the other pass. The lag is made at the first pause of the first pass, which goes on there.

A plan may know better turns for an F and a B (``schedules/turn_order.py``): it then says which pass
begins, and how many pieces of a pass run in each turn. A piece ends where the pass would hand over.
If the turn has another piece, the pass goes on instead, and waits for its own collective.

No real timing can deadlock. Only the layers and the plan, and not the time of a run, decide where
passes switch. So ranks that run the same pair issue the collectives of all their groups in one
order, and wait for them in one order. A rank waits for a collective only after it has issued all
that stand before the wait in this order, whichever groups they belong to. Take the first wait in
the order at which some rank stands still: every rank of its group issues the collective without
passing another wait at which it could stand still, so the collective ends.

On CUDA both threads use the stream of the caller. NCCL runs a collective on a stream of its own,
and waiting for it is an instruction to the stream. So kernels of the other pass, which the host
issues in between, run during the collective.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Condition

import torch


class _AbandonedError(Exception):
    """The other pass of the pair has failed, so this one cannot end either."""


class Turns:
    """The turns of the two passes of a pair; one pair runs at a time."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._turn = 0
        self._switches = [0, 0]
        self._over = [True, True]
        self._has_failed = self._pauses = False
        self._lags = False
        self._pieces: Iterator[int] | None = None
        self._left = 0
        self._began: Callable[[int], None] | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pair")

    def run(
        self,
        first: Callable[[], None],
        second: Callable[[], None],
        *,
        pauses: bool = False,
        pieces: Sequence[int] = (),
        began: Callable[[int], None] | None = None,
    ) -> None:
        """Run both; ``first`` begins, in a thread of its own.

        If one of them fails, the other one ends at its next turn: other ranks may wait for the one
        that has failed, so collectives would never come to an end.

        Args:
            first: the pass that begins.
            second: the other pass.
            pauses: whether passes also hand over at their pauses; for two passes that pause.
            pieces: how many pieces of a pass run in each turn; further turns have one piece. Empty:
                the passes hand over wherever they can.
            began: told where each turn begins, in the thread of the pass: 0 for ``first``, 1 for
                ``second``.

        Raises:
            BaseException: the error of the pass that failed first.
        """
        self._turn, self._over, self._has_failed = 0, [False, False], False
        self._pauses, self._lags = pauses, False
        self._pieces = iter(pieces) if pieces else None
        self._began = began
        self._begin_turn()
        stream = _current_stream()

        def beside() -> None:
            # PyTorch has a current stream for each thread.
            with stream():
                self._play(0, first)

        running = self._worker.submit(beside)
        found: BaseException | None = None
        try:
            self._play(1, second)
        except BaseException as error:
            found = error
        try:
            running.result()
        except BaseException as error:
            if found is None or isinstance(found, _AbandonedError):
                found = error
        self._has_failed = False
        if found is not None:
            raise found

    @property
    def runs(self) -> bool:
        """Whether a pair runs, of which one pass may be over."""
        return not all(self._over)

    def pause(self) -> None:
        """Let the other pass go on between two products, if the pair does so."""
        if not self._pauses or not self.runs:
            return
        if self._pieces is None and self._turn == 0 and not self._lags:
            self._lags = True
            return
        self.hand_over()

    def hand_over(self) -> None:
        """Let the other pass go on; return when the other pass hands over again or ends.

        Without a pair, when the other pass has ended before, or when the turn has another piece of
        this pass, the call returns immediately.
        """
        own = self._turn  # only the pass whose turn it is can call
        self._switches[own] += 1
        if not self._over[1 - own] and not self._has_further_piece():
            with self._changed:
                self._turn = 1 - own
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._turn == own)
            self._tell(own)
        if self._has_failed:
            raise _AbandonedError("the other pass of the pair has failed")

    def _has_further_piece(self) -> bool:
        """Return whether the turn goes on; otherwise the turn of the other pass begins."""
        self._left -= 1
        if self._left > 0:
            return True
        self._begin_turn()
        return False

    def _begin_turn(self) -> None:
        self._left = next(self._pieces, 1) if self._pieces is not None else 1

    def _tell(self, own: int) -> None:
        """Tell the observer that a turn of this pass begins."""
        if self._began is not None:
            self._began(own)

    def divided(self, parts: Iterable[Callable[[], None]]) -> None:
        """Run the parts of a pass, and hand over after each that has not handed over by itself."""
        for part in parts:
            own = self._turn
            before = self._switches[own]
            part()
            del part  # its tensors, during the turn of the other pass
            if self._switches[own] == before:
                self.hand_over()

    def _play(self, own: int, work: Callable[[], None]) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._turn == own)
            if not self._has_failed:
                self._tell(own)
                work()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            with self._changed:
                self._over[own] = True
                self._turn = 1 - own
                self._begin_turn()
                self._changed.notify_all()


def _current_stream() -> Callable[[], AbstractContextManager[object]]:
    """Return a function that enters the current CUDA stream in another thread."""
    if not torch.cuda.is_initialized():
        return nullcontext
    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)
