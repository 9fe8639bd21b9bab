"""Links: the ways that messages take between pipeline ranks.

A link has one direction and carries one kind of message, so its messages arrive in order. Where
each link has a communicator of its own, a message that nobody has taken yet holds up no other
message.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Link(NamedTuple):
    """One direction between two pipeline ranks, for one kind of message.

    Attributes:
        kind: kind of message.
        sender: pipeline rank.
        receiver: pipeline rank.
    """

    kind: str
    sender: int
    receiver: int

    def __str__(self) -> str:
        """Return a readable name: ``X 0 to 1``."""
        return f"{self.kind} {self.sender} to {self.receiver}"

    @property
    def ends(self) -> tuple[int, int]:
        """Both pipeline ranks, ascending."""
        return min(self.sender, self.receiver), max(self.sender, self.receiver)


def in_rounds(links: Iterable[Link]) -> tuple[Link, ...]:
    """Order links so that ranks that make them one after another hardly wait for each other.

    Both ends of a link meet to make it. In order of ranks, link k would wait for link k - 1, and a
    job of p ranks for p - 1 links in a row. In rounds no rank has two links of one round, so the
    links of a round are made side by side, and there are about as many rounds as a rank has links.
    """
    left, ordered = sorted(set(links)), list[Link]()
    while left:
        busy: set[int] = set()
        later = []
        for link in left:
            if busy.isdisjoint(link.ends):
                busy.update(link.ends)
                ordered.append(link)
            else:
                later.append(link)
        left = later
    return tuple(ordered)
