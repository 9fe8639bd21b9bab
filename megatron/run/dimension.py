"""What a user leaves to the plan of a run with the word ``auto``: a dimension, and its choices.

Every topic declares its own dimensions; ``choices`` lists them all.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.flags.groups import Flags
from megatron.run.edit import Choice, in_words


class NamedChoice(NamedTuple):
    """One of the ways that a run could go in a dimension.

    Attributes:
        edits: the edits that ask for it on a command line.
        nothing: words that say that nothing is asked for; empty: the edits say it.
    """

    edits: Choice
    nothing: str = ""

    @property
    def words(self) -> str:
        """The flags that ask for it by name, or words that say that nothing is asked for."""
        return self.nothing or in_words(self.edits)


class Dimension(NamedTuple):
    """A property of a run that its plan may choose.

    Attributes:
        flag: the flag with the word that leaves the property to the plan.
        is_open: whether flags leave it to the plan.
        choices: returns its choices that go with the other flags. A run takes the first where
            nothing can compare them.
        closed: returns the reason why there is only one choice, if there is only one.
        by_flops: whether FLOPs tell which choice is best. Otherwise that takes the seconds and the
            memory of a known GPU.
    """

    flag: str
    is_open: Callable[[Flags], bool]
    choices: Callable[[Flags], Sequence[NamedChoice]]
    closed: Callable[[Flags], str] = lambda flags: "nothing else goes with the other flags"
    by_flops: bool = False
