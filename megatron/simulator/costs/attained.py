"""Shares of a GPU's data sheet that measured passes attain, by the treatment of the vocabulary.

Collectives that run beside the passes slow the passes down, so each treatment has its own shares.
The file holds 24 constants: three for all treatments, six for ``none``, and five for each of the
three treatments that split the vocabulary, whose S and T were measured as one and share an
overhead. They come from 20 measured runs of Megatron-LM on 8 A100s by
``tools/predictions/calibrate.py``; a test calibrates again and compares. On other GPUs nothing was
measured: they are assumed to attain the same shares, and to have the same overheads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import Treatment

OUTPUT: Final = 0.797
"""Share of the peak that the output layer's three large products attain, whoever computes them."""

BANDWIDTH: Final = 0.7735
"""Share of the memory bandwidth that elementwise kernels attain."""

LATENCY: Final = 327.7e-6
"""Latency of a message between neighbours in seconds."""


@dataclass(frozen=True)
class Attained:
    """What passes attain under one treatment of the vocabulary.

    Attributes:
        forward: share of the peak that the products of a layer's forward attain.
        backward: share of the peak that the products of a layer's backward attain.
        overhead: seconds that a pass of the vocabulary takes in addition to its products and
            its memory traffic. If the vocabulary is not split, the overhead of S and T is that of
            the output layer in the last stage's F and B, and the overhead of IF and IB that of the
            input layer in the first stage's.
    """

    forward: float
    backward: float
    overhead: Mapping[PassKind, float]


MEASURED: Final[Mapping[str, Attained]] = {
    "none": Attained(0.6715, 0.6562, {"S": 767e-6, "T": 990e-6, "IF": 75e-6, "IB": 283e-6}),
    "vocab-1": Attained(0.6215, 0.6183, {"S": 287e-6, "T": 287e-6, "IF": 451e-6, "IB": 298e-6}),
    "vocab-2": Attained(0.6198, 0.6169, {"S": 355e-6, "T": 355e-6, "IF": 461e-6, "IB": 299e-6}),
    "interlaced": Attained(0.6604, 0.6347, {"S": 404e-6, "T": 404e-6, "IF": 564e-6, "IB": 360e-6}),
}
"""What passes attain, by the name of a treatment that was measured."""


def attained_under(treatment: Treatment) -> Attained:
    """Return what passes attain under a treatment.

    A treatment that was not measured is given what the nearest one attains: ``none`` if it does not
    split the vocabulary, as ``redis``; else ``vocab-1``, which overlaps its collectives too, and E
    the overhead of S.
    """
    if treatment.name in MEASURED:
        return MEASURED[treatment.name]
    if not treatment.is_sharded:
        return MEASURED["none"]
    nearest = MEASURED["vocab-1"]
    return replace(nearest, overhead={**nearest.overhead, "E": nearest.overhead["S"]})
