"""Shares of corpora: the shares of the splits, and the weights within a blend."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

Blend = tuple[tuple[float, Path], ...]
"""Weights and prefixes of corpora; a prefix names ``PREFIX.bin`` and ``PREFIX.idx``, and weights
need not sum to one."""


EvaluationSet = Literal["validation", "test"]
"""A part of the data that is only evaluated."""


class Share(NamedTuple):
    """A share of a corpus within a blend.

    Attributes:
        weight: weight of the share; the weights of a blend need not sum to one.
        prefix: the corpus ``PREFIX.bin`` and ``PREFIX.idx``.
        begin: where the share begins, as a fraction of the corpus from 0 to 1.
        end: where the share ends, as a fraction of the corpus.
    """

    weight: float
    prefix: Path
    begin: float = 0.0
    end: float = 1.0


@dataclass(frozen=True)
class OwnPaths:
    """The corpora when training, validation and test have corpora of their own.

    Attributes:
        train: blend to train on.
        valid: blends of the validation sets, one blend per set; empty: there is no validation.
        test: blend of the test set; empty: there is no test.
        valid_names: names of the validation sets, if there are several.
    """

    train: tuple[Share, ...]
    valid: tuple[tuple[Share, ...], ...] = ()
    test: tuple[Share, ...] = ()
    valid_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """Shares of every corpus's documents for training, validation and test, on any scale.

    Attributes:
        written: the shares as a user has written them.
    """

    train: float
    valid: float
    test: float
    written: str = field(default="", compare=False)

    @classmethod
    def of(cls, text: str) -> "Split":
        """Read up to three numbers, separated by commas or slashes; missing shares are 0.

        Raises:
            ValueError: the text has another form, or nothing is left to train on.
        """
        shares = [_number(word) for word in text.replace("/", ",").split(",")]
        if len(shares) > 3 or not min(shares) >= 0 or not 0 < shares[0] <= sum(shares) < math.inf:
            raise ValueError(
                "give shares for training, validation and test, at least 0 and the first above it, "
                "for example 969,30,1"
            )
        train, valid, test = (*shares, 0.0, 0.0)[:3]
        return cls(train, valid, test, text)

    def __str__(self) -> str:
        return self.written or ",".join(f"{share:g}" for share in self.shares)

    @property
    def shares(self) -> tuple[float, float, float]:
        """The three shares."""
        return self.train, self.valid, self.test

    @property
    def evaluated(self) -> tuple[EvaluationSet, ...]:
        """The sets for which the shares leave documents."""
        found: list[EvaluationSet] = ["validation"] if self.valid > 0 else []
        if self.test > 0:
            found.append("test")
        return tuple(found)


def _number(word: str) -> float:
    """Return the number that a word stands for; NaN if the word is no number."""
    try:
        return float(word)
    except ValueError:
        return math.nan
