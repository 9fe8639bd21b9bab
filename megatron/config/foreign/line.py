"""A command line as it is written, and conditions on it.

An answer to one flag may depend on others: a distributed optimizer changes nothing if there is one
replica of the model. Such a condition is judged before any value is read, and before the flags are
known to be free of mistakes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """The flags of a command line with their words.

    Attributes:
        given: the words behind each flag; of a repeated flag the last ones.
        world_size: ranks of the job.
    """

    given: Mapping[str, Sequence[str]]
    world_size: int = 1

    def word(self, option: str) -> str | None:
        """The words behind a flag in one; ``None`` if it is not given."""
        words = self.given.get(option)
        return None if words is None else " ".join(words)

    def number(self, option: str, otherwise: float = 0) -> float:
        """The number behind a flag; ``otherwise`` if it is not given, or no number."""
        try:
            return float(self.word(option) or "")
        except ValueError:
            return otherwise

    @property
    def replicas(self) -> int:
        """Copies of the model in the job; a dry run may name their number."""
        named = self.number("--dry-run-replicas") if "--dry-run" in self.given else 0
        if named:
            return int(named)
        names = ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
        ranks = 1.0
        for name in names:
            ranks *= self.number(f"--{name}-size", 1)
        return max(1, int(self.world_size // max(ranks, 1)))

    @property
    def batch(self) -> float:
        """Samples of an iteration."""
        return max(1, self.number("--global-batch-size", self.number("--micro-batch-size", 1)))

    @property
    def samples(self) -> float:
        """The run's length in samples, without ``--train-tokens``; 0 if none is given."""
        return self.number("--train-samples", self.number("--train-iters") * self.batch)

    @property
    def last_iteration(self) -> float:
        """The last iteration that runs; 0 if no length is given."""
        total = self.samples // self.batch
        return min(total, self.number("--exit-interval", total))

    def samples_of(self, tokens: float) -> int:
        """The whole samples that some tokens make."""
        return int(tokens // max(1, self.number("--seq-length", 1)))


@dataclass(frozen=True)
class Condition:
    """A condition on the other flags of the line.

    Attributes:
        words: the condition, to follow the flag.
        holds: whether a line meets it.
    """

    words: str
    holds: Callable[[Line], bool]


def without(*options: str) -> Condition:
    """None of the flags is given."""
    return Condition(
        f"without {' and '.join(options)}",
        lambda line: line.given.keys().isdisjoint(options),
    )


def beside(*options: str) -> Condition:
    """One of the flags is given."""
    return Condition(
        f"beside {' or '.join(options)}",
        lambda line: not line.given.keys().isdisjoint(options),
    )


def at_one(option: str) -> Condition:
    """A size is 1, its default."""
    return Condition(f"at {option} 1", lambda line: line.number(option, 1) <= 1)


SHORTER_TOKENS = Condition(
    "beside a shorter --train-tokens",
    lambda line: 0 < line.samples_of(line.number("--train-tokens")) < line.samples,
)
ONE_REPLICA = Condition(
    "with one replica of the model (data-parallel size 1)",
    lambda line: line.replicas * line.number("--context-parallel-size", 1) == 1,
)
