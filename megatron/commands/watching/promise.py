"""The figures that a plan promises, from the answer of ``plan-pretraining --json``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron.commands.watching.record import number, part, word
from megatron.native.files import read_text

_WAY_OUT: Final = "give the file that plan-pretraining --json has printed"

_WAITS: Final = ("transfers", "vocabulary", "replicas", "host", "idle")
"""Reasons of a plan's seconds in which a rank runs no pass."""

_STEP: Final = "optimizer's step"
_FIGURES: Final = ("seconds", "tokens_per_second", "mfu", "bytes")


@dataclass(frozen=True)
class Promise:
    """The way that a plan takes.

    Attributes:
        name: of the file.
        ranks: of its job.
        figures: ``seconds`` of an iteration, ``tokens_per_second``, ``mfu``, ``bytes`` of the
            fullest rank, and ``idle``, as docs/metrics.md defines it, where the plan knows these.
        reasons: seconds of an iteration by reason, the most first.
        schedule: and treatment of the vocabulary, in words.
    """

    name: str
    ranks: int
    figures: Mapping[str, float]
    reasons: Mapping[str, float]
    schedule: str

    @classmethod
    def read(cls, path: Path) -> "Promise":
        """Read a plan.

        Raises:
            ValueError: the file cannot be read or holds none; the message says the way out.
        """
        try:
            answer = json.loads(read_text(path))
        except OSError as error:
            raise ValueError(f"{error.strerror or error}: {_WAY_OUT}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the file holds no JSON: {_WAY_OUT}") from error
        taken, ranks = part(answer, "taken"), number(part(answer, "gpus", "count"))
        figures = {name: number(part(answer, "taken", name)) for name in _FIGURES}
        if not (figures["seconds"] > 0 and ranks > 0):
            raise ValueError(f"the file has no 'taken' with 'seconds', or no 'gpus': {_WAY_OUT}")
        reasons = _reasons(taken.get("seconds_by_reason"))
        if reasons:
            passes = figures["seconds"] - reasons.get(_STEP, 0.0)
            waits = sum(reasons.get(name, 0.0) for name in _WAITS)
            figures["idle"] = waits / passes if passes > 0 else 0.0
        known = {name: value for name, value in figures.items() if value == value}
        words = (word(taken.get("schedule")), word(taken.get("vocabulary")))
        return cls(path.name, int(ranks), known, reasons, ", ".join(filter(None, words)))

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {
            "name": self.name,
            "ranks": self.ranks,
            "figures": dict(self.figures),
            "reasons": dict(self.reasons),
            "schedule": self.schedule,
        }


def _reasons(found: object) -> dict[str, float]:
    if not isinstance(found, Mapping):
        return {}
    known = {word(name): number(value) for name, value in found.items()}
    positive = {name: value for name, value in known.items() if value > 0}
    return dict(sorted(positive.items(), key=lambda own: -own[1])[:32])
