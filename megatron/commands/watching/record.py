"""One line of a file of records, taken as damaged or hostile until it is shown to be sound.

docs/metrics.md defines the values. Numbers that JSON does not have (NaN, infinity) and numbers that
no float holds count as unknown.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from math import isfinite, nan
from typing import Any, Final

Record = Mapping[str, Any]

EVENTS: Final = ("start", "iterations", "evaluation", "generation", "end")

_LONGEST_WORD: Final = 80
_LONGEST_TEXT: Final = 2000
_MOST_TEXTS: Final = 32
"""Texts of one record that are read."""

_LAST: Final = 2**53  # the last iteration that every number of a page can tell
_DECODER: Final = json.JSONDecoder(parse_constant=lambda _: None)

PLAIN: Final = (
    *("consumed_tokens", "consumed_samples", "seconds_per_iteration", "tflops_per_rank", "mfu"),
    *("tokens_per_second", "learning_rate", "global_batch_size", "lm_loss", "grad_norm"),
    *("params_norm", "num_zeros", "loss_scale", "skipped", "nans", "expert_imbalance"),
    *("seconds_in_saves", "seconds_in_evaluations"),
)
"""Fields of an interval that are numbers."""

_MOST_NAMED: Final = 16
"""Named losses of an interval that are read."""


def record_of(line: bytes) -> Record | None:
    """Return the record in a line; ``None``: there is none, or it has no event or iteration."""
    try:
        found = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        return None
    iteration = found.get("iteration")
    return found if type(iteration) is int and 0 <= iteration <= _LAST else None


def number(value: object) -> float:
    """Return a finite number; NaN for anything else."""
    if type(value) is float or type(value) is int:
        try:
            found = float(value)
        except OverflowError:
            return nan
        return found if isfinite(found) else nan
    return nan


def word(value: object, unknown: str = "", longest: int = _LONGEST_WORD) -> str:
    """Return a text of some length at most; ``unknown`` for anything else."""
    return value[:longest] if isinstance(value, str) else unknown


def seconds_of(record: Record) -> float:
    """Return the time of a record in seconds since 1970; NaN if the record has none."""
    try:
        return datetime.fromisoformat(word(record.get("time"))).timestamp()
    except (ValueError, OverflowError, OSError):
        return nan


def part(record: Record, *names: str) -> Any:
    """Return the value at a path of names; ``None``: there is none."""
    found: Any = record
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def interval_values(record: Record) -> dict[str, float]:
    """Return the known numbers of an interval by the names of the page's columns."""
    values = {name: number(record.get(name)) for name in PLAIN}
    values |= dict(_losses(record))
    values |= _of_ranks(ranks_of(record))
    slowest = part(record, "slowest")
    if isinstance(slowest, dict):
        values["slowness"] = number(slowest.get("slowness"))
        values["slowest rank"] = number(slowest.get("rank"))
    return {name: value for name, value in values.items() if value == value}


def _losses(record: Record) -> Iterator[tuple[str, float]]:
    further, named = record.get("mtp_losses"), record.get("layer_losses")
    if isinstance(further, list):
        for ahead, loss in enumerate(further[:_MOST_NAMED], 2):
            yield f"loss of token {ahead}", number(loss)
    if isinstance(named, dict):
        for name, loss in list(named.items())[:_MOST_NAMED]:
            yield f"router: {word(name)}", number(loss)


def texts_of(record: Record) -> list[dict[str, str]]:
    """Return the prompts and texts that a model has written."""
    found = record.get("texts")
    rows = [own for own in found if isinstance(own, dict)] if isinstance(found, list) else []
    return [
        {name: word(own.get(name), longest=_LONGEST_TEXT) for name in ("prompt", "text")}
        for own in rows[:_MOST_TEXTS]
    ]


def slowest_facts(record: Record) -> dict[str, Any]:
    """Return the coordinates of the slowest rank, and the passes in which it lost most."""
    names = ("pipeline", "tensor", "context", "data")
    places = {name: number(part(record, "slowest", name)) for name in names}
    known = {name: int(place) for name, place in places.items() if place == place}
    return {"place": known, "passes": word(part(record, "slowest", "passes"))}


def ranks_of(record: Record) -> list[Record]:
    """Return the figures of the ranks that an interval has."""
    found = record.get("ranks")
    return [own for own in found if isinstance(own, dict)] if isinstance(found, list) else []


def _of_ranks(ranks: list[Record]) -> dict[str, float]:
    """Return figures over all ranks: ends and mean of idle time, ends of memory."""
    values: dict[str, float] = {}
    for field in ("peak_memory", "reserved_memory"):
        held = [own for rank in ranks if (own := number(rank.get(field))) == own]
        if held:
            values[f"{field} max"], values[f"{field} min"] = max(held), min(held)
    idle = [(own, at) for at, rank in enumerate(ranks) if (own := number(rank.get("idle"))) == own]
    if idle:
        shares = [share for share, _ in idle]
        values["idle"] = sum(shares) / len(shares)
        values["idle max"] = max(shares)
        values["idle min"], busiest = min(idle)
        values["busiest rank"] = number(ranks[busiest].get("rank"))
    values |= {f"idle: {reason}": share for reason, share in mean_reasons(ranks).items()}
    return values


def mean_reasons(ranks: Sequence[Record]) -> dict[str, float]:
    """Return the mean idle share of every reason, over the ranks that know their reasons."""
    sums: dict[str, float] = {}
    known = 0
    for rank in ranks:
        reasons = rank.get("idle_by_reason")
        if isinstance(reasons, dict) and reasons:
            known += 1
            for name, share in reasons.items():
                if name in sums or len(sums) < _MOST_NAMED:
                    sums[name] = sums.get(name, 0.0) + number(share)
    return {word(name): total / known for name, total in sums.items()}
