"""A dimension: one property of a run that may be chosen for it, and the ways that it can go.

Two searches choose: ``auto`` between the properties that flags leave to the plan by this word
(``run/choices.py``), and ``plan-pretraining`` between all that it knows
(``planning/search/dimensions.py``).
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from megatron.flags.groups import Flags
from megatron.run.edit import Choice, in_words

Kind = Literal["shape", "factor", "pipeline", "order"]
"""What the choices of a dimension change, which says how a search first judges them
(``planning/search/coarse.py``).

shape: what a rank computes for a layer; every combination is counted. factor: by how much a layer
takes longer or holds less; each choice is counted once, with everything else as it is, and is taken
to change every combination by the same factor. pipeline: the stages, over which work and memory are
spread. order: the order of the passes, which only plans can judge. An order may change a layer by a
factor too (``counted``).
"""

Choices = Callable[[Flags], Sequence[Choice]]


class Auto(NamedTuple):
    """How flags leave a dimension to the plan of their run.

    Attributes:
        flag: the flag with the word ``auto``.
        is_open: whether flags do so.
        closed: returns the reason why there is only one choice, if there is only one.
    """

    flag: str
    is_open: Callable[[Flags], bool]
    closed: Callable[[Flags], str] = lambda flags: "nothing else goes with the other flags"


class Dimension(NamedTuple):
    """A property of a run that may be chosen.

    Attributes:
        name: the property, for tables.
        kind: what its choices change.
        options: the flags that its choices set.
        choices: returns its choices beside other flags, the most promising first. A run takes the
            first where nothing can compare them. A choice that a rule refuses is passed over.
        closing: the flags with which the user decides the property, so that a search chooses
            nothing.
        auto: how flags leave it to the plan of their run; ``None``: they cannot.
        nothing: words for a choice that leaves all its flags out.
        by_flops: whether FLOPs tell which choice is best. Otherwise that takes the seconds and the
            memory of a known GPU.
        stand_ins: number of the first choices that stand for all others while a search compares
            layouts.
        counted: whether choices of an order change a layer too, and are counted as a factor is.
        beside: flags of factors that decide which choices of an order there are.
        later: whether a search with the first choice alone comes before, with all estimates of its
            own. So a dimension that is added makes no answer worse.
    """

    name: str
    kind: Kind
    options: tuple[str, ...]
    choices: Choices
    closing: tuple[str, ...] = ()
    auto: Auto | None = None
    nothing: str = ""
    by_flops: bool = False
    stand_ins: int = 1
    counted: bool = False
    beside: tuple[str, ...] = ()
    later: bool = False

    def is_open(self, flags: Flags) -> bool:
        """Return whether flags leave it to the plan of their run."""
        return self.auto is not None and self.auto.is_open(flags)

    def words(self, choice: Choice) -> str:
        """Return the flags that ask for a choice by name, or that nothing is asked for."""
        return in_words(choice) or self.nothing

    @property
    def at_first(self) -> "Dimension":
        """The dimension as it is searched first: with the first choice alone if it is ``later``."""
        choices = self.choices
        return self._replace(choices=lambda flags: choices(flags)[:1]) if self.later else self
