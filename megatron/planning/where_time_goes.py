"""The seconds of an iteration by their reasons, on average over the ranks."""

from collections.abc import Mapping
from typing import Literal

from megatron.planning.forecast_run import RunForecast

Reason = Literal[
    "products",
    "attention",
    "other kernels",
    "tensor",
    "context",
    "experts",
    "vocabulary",
    "replicas",
    "transfers",
    "host",
    "crowding",
    "idle",
    "step",
]
"""The reasons: kernels; waiting for collectives of an axis, for transfers between stages, and for
copies to and from the host; passes that are slower while a collective is under way; waiting for
work of other ranks; the optimizer's step."""


def where_time_goes(found: RunForecast) -> Mapping[Reason, float]:
    """Return the seconds of an iteration by reason, a mean over the ranks; reasons of 0 s too.

    They add up to ``found.outcome.seconds``.
    """
    raise NotImplementedError
