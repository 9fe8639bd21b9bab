"""Results of rough counts: of a shape, of a choice that changes a shape, of a combination."""

from typing import NamedTuple

from megatron.run.edit import Choice


class Shape(NamedTuple):
    """The counted seconds and bytes of a shape.

    Attributes:
        seconds: of a sample's passes on one stage.
        whole: bytes of weights, gradients and states that stages divide.
        shared: bytes of states that the replicas divide, whatever the stages.
        kept: bytes that a microbatch leaves on one stage.
        room: bytes that tensors may take on a rank.
    """

    seconds: float
    whole: float
    shared: float
    kept: float
    room: float


class Factor(NamedTuple):
    """The factors by which a choice changes the seconds, states and kept bytes of a shape."""

    seconds: float = 1.0
    static: float = 1.0
    kept: float = 1.0


Combination = tuple[Choice, ...]
"""One choice for every open dimension, in the order of the dimensions."""

Ordering = tuple[object, ...]
"""Pipeline ranks, schedule and treatment: a plan of these teaches about others of the same."""


class Rough(NamedTuple):
    """A combination of choices, and the first guess of its seconds and bytes.

    Attributes:
        choices: one for every dimension.
        ordering: its pipeline ranks, schedule and treatment.
        seconds: of an iteration.
        peak: bytes of the fullest rank.
        room: bytes that tensors may take there.
    """

    choices: Combination
    ordering: Ordering
    seconds: float
    peak: float
    room: float
