"""One quantity that a rank holds, and the test whether a pass may come earlier in the row.

Only passes that change the quantity are looked at, because a pass may overtake a long part of the
row: at p = 128 an IF overtakes a thousand other passes.
"""


class Stock:
    """One quantity that a rank holds, and its changes in the rest of the base row.

    The base row is the row from which the search starts.

    Attributes:
        room: how much more the rank may hold.
        passes: the number, microbatch and change of every pass of the base row that changes the
            quantity, in order.
        head: index of the first pass in ``passes`` that is not placed yet.
    """

    __slots__ = ("head", "passes", "room")

    def __init__(self, room: float, passes: list[tuple[int, int, float]]) -> None:
        self.room = room
        self.passes = passes
        self.head = 0

    def fits(self, number: int, change: float, following: list[int]) -> bool:
        """Whether the rest of the base row still fits if ``number`` goes next and takes ``change``.

        The base row fits as it stands, so only the passes that ``number`` overtakes count.
        """
        passes, at, microbatch = self.passes, self.head, following[number]
        while passes[at][1] < following[passes[at][0]]:
            at += 1
        self.head = at
        room = self.room - change
        while room >= 0:
            other, index, taken = passes[at]
            if other == number and index == microbatch:
                return True
            if index >= following[other]:
                room -= taken
            at += 1
        return False
