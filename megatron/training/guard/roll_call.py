"""Asks all ranks where they are, over the store, which works even when process groups hang.

Every rank has a thread that answers. Any rank may call. The first rank to call collects the answers
and tells all ranks the verdict; the other ranks answer and hear the verdict. Calls are numbered,
and a rank takes part in all calls, one after the other.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from megatron.training.guard.places import Place
from megatron.training.rendezvous import Rendezvous, come


@dataclass(frozen=True)
class Verdict:
    """The result of a call.

    Attributes:
        reason: why the job ends; empty if it goes on.
        machine: the machine of the rank that called.
        is_told: whether another rank has told a reason already.
    """

    reason: str = ""
    machine: str = ""
    is_told: bool = False


class RollCall:
    """One rank's part in the calls that ask all ranks where they are.

    ``rendezvous`` must have a connection to the store that only this thread uses.

    All methods raise ``DistError`` if the store is out of reach.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._store = rendezvous.store
        self._rank = rendezvous.rank
        self._size = rendezvous.size
        self._number = 0

    def is_called(self) -> bool:
        """Return whether a rank has called."""
        return self._store.check([self._key("call")])

    def call(self) -> bool:
        """Call all ranks; return whether this rank is the first to do so, and must ``conclude``."""
        first = self._store.add(self._key("callers"), 1) == 1
        if first:
            self._store.set(self._key("call"), "")
        return first

    def answer(self, place: Place) -> None:
        """Tell the caller where this rank is."""
        self._store.set(self._key(f"place of {self._rank}"), place.to_text())

    def places(self, seconds: float) -> Mapping[int, Place]:
        """Return the places of the ranks that answer in time, the caller's own among them."""
        keys = {rank: self._key(f"place of {rank}") for rank in range(self._size)}
        if not self._comes(list(keys.values()), seconds):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: Place.from_text(self._store.get(key).decode()) for rank, key in keys.items()}

    def conclude(self, verdict: Verdict) -> None:
        """Tell the other ranks the verdict, which ends this call."""
        self._store.set(self._key("verdict"), json.dumps(asdict(verdict)))
        self._number += 1

    def hear(self, seconds: float) -> Verdict:
        """Wait for the verdict; if the caller sends none in time, the job goes on."""
        key = self._key("verdict")
        heard = self._comes([key], seconds)
        verdict = Verdict(**json.loads(self._store.get(key))) if heard else Verdict()
        self._number += 1
        return verdict

    def _key(self, what: str) -> str:
        return f"roll call {self._number}: {what}"

    def _comes(self, keys: list[str], seconds: float) -> bool:
        return come(self._store, keys, seconds)
