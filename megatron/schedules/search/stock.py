"""One quantity that a rank holds, and whether the rest of its row fits if a pass comes earlier.

Only passes that change the quantity are looked at, since a pass may overtake a long part of the
row: at p = 128 an IF overtakes a thousand others.
"""


class Stock:
    """One quantity that a rank holds, and what the rest of its base row does to it.

    Attributes:
        room: how much more the rank may hold.
        passes: the passes of the base row that change the quantity, in order: number, microbatch
            and change.
        head: index of the first of them that is not placed yet.
    """

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
