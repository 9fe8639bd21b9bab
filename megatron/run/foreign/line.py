"""A command line as it is written, and functions that translate some flags of other projects.

The answer to a flag may depend on other flags: a distributed optimizer changes nothing if there is
one replica of the model. Such a condition is judged before any value is read, so the flags may
still have mistakes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Final

from megatron.data.batch_sizes import BatchSizes, Growth
from megatron.run.batch_growth import parse_rampup, parse_size_steps


@dataclass(frozen=True)
class Line:
    """The flags of a command line with their words.

    Attributes:
        given: the words behind each flag. If a flag is given twice, the later words.
        world_size: ranks of the job.
    """

    given: Mapping[str, Sequence[str]]
    world_size: int = 1

    def asks(self, option: str) -> bool:
        """Whether a flag is given."""
        return option in self.given

    def has(self, option: str, pattern: str) -> bool:
        """Whether a flag is given with words that match a pattern."""
        return option in self.given and fnmatchcase(" ".join(self.given[option]), pattern)

    def number(self, name: str, otherwise: float = math.nan) -> float:
        """Return the number behind a flag, or a quantity of the line; else ``otherwise``."""
        if name in _QUANTITIES:
            return float(getattr(self, name))
        try:
            found = float(" ".join(self.given.get(name, ())))
        except ValueError:
            return otherwise
        return found if math.isfinite(found) else otherwise

    @property
    def replicas(self) -> int:
        """Copies of the model in the job; a dry run may name their number."""
        named = self.number("--dry-run-replicas", 0) if "--dry-run" in self.given else 0
        if named:
            return int(named)
        names = ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
        ranks = math.prod(self.number(f"--{name}-size", 1) for name in names)
        return max(1, int(self.world_size // max(ranks, 1)))

    @property
    def batch(self) -> float:
        """Samples of an iteration."""
        return max(1, self.number("--global-batch-size", self.number("--micro-batch-size", 1)))

    @property
    def sizes(self) -> BatchSizes:
        """The sizes of all batches; of a faulty growth, as if batches did not grow."""
        try:
            return BatchSizes(int(self.batch), self._growth())
        except ValueError:
            return BatchSizes(int(self.batch))

    def _growth(self) -> Growth | None:
        """Return how batches grow.

        Raises:
            ValueError: the words describe no growth.
        """
        last, unit = int(self.batch), max(1, int(self.number("--micro-batch-size", 1)))
        steps = self.given.get("--batch-size-steps", ())
        if in_tokens := self.given.get("--step-batch-size-schedule"):
            steps = _steps_in_samples(self, in_tokens)
        rampup = parse_rampup(self.given.get("--rampup-batch-size", ()), last, unit)
        return rampup or parse_size_steps(steps, last, unit)

    @property
    def samples(self) -> float:
        """The run's length in samples, without ``--train-tokens``; 0 if none is given."""
        iterations = int(self.number("--train-iters", 0))
        return self.number("--train-samples", self.sizes.samples_of(max(0, iterations)))

    @property
    def last_iteration(self) -> float:
        """The last iteration that runs; 0 if no length is given."""
        total = self.sizes.iterations(int(self.samples))
        return min(total, self.number("--exit-interval", total))

    def samples_of(self, tokens: float) -> int:
        """Return the number of whole samples in some tokens."""
        return int(tokens // max(1, self.number("--seq-length", 1)))

    @property
    def samples_of_tokens(self) -> int:
        """The number of whole samples in ``--train-tokens``; 0 if the flag is not given."""
        return self.samples_of(self.number("--train-tokens", 0))


_QUANTITIES: Final = ("replicas", "samples", "samples_of_tokens", "last_iteration")
"""The quantities of a line that conditions may name."""

Computed = Callable[[Line, Sequence[str]], str]
"""A function from a line and the values of a flag to the words that the flag is read as."""


def _grouped(line: Line, values: Sequence[str]) -> str:
    heads, groups = " ".join(line.given.get("--num-attention-heads", ())), values[0]
    return "" if heads == groups else f"--group-query-attention --num-query-groups {groups}"


def _train_tokens(line: Line, _: Sequence[str]) -> str:
    """Return the length in samples; nothing if another flag gives a shorter length.

    Training ends at the shorter of the two lengths.
    """
    samples = line.samples_of_tokens
    return "" if 0 < line.samples <= samples else f"--train-samples {samples}"


def _span(span: str, line: Line, _: Sequence[str]) -> str:
    """Return a span of the learning rate in the unit of the training's length."""
    samples = line.samples_of(line.number(f"--lr-{span}-tokens", 0))
    if "--train-iters" not in line.given or 0 < line.samples_of_tokens < line.samples:
        return f"--lr-{span}-samples {samples}"
    return f"--lr-{span}-iters {line.sizes.iterations(samples)}"


def _size_steps(line: Line, values: Sequence[str]) -> str:
    return f"--batch-size-steps {' '.join(_steps_in_samples(line, values))}"


def _steps_in_samples(line: Line, values: Sequence[str]) -> list[str]:
    """Return thresholds in samples, rounded down, for thresholds in tokens.

    A word that is no number stays as it is, so that a rule reports it.
    """
    found = []
    for entry in " ".join(values).replace(",", " ").split():
        threshold, colon, size = entry.partition(":")
        digits = threshold.upper().rstrip("KMBT")
        unit = _UNITS.get(threshold.upper()[len(digits) :], math.nan)
        try:
            tokens = int(float(digits) * unit)
        except (ValueError, OverflowError):
            found.append(entry)
        else:
            found.append(f"{line.samples_of(tokens)}{colon}{size}")
    return found


def _moe_recompute(line: Line, _: Sequence[str]) -> str:
    """Return the flags that compute mixtures again, and attention where other flags ask for it."""
    attention = any(
        line.asks(option) for option in ("--recompute-activations", "--recompute-granularity")
    )
    asked = "" if line.asks("--recompute-activations") else "--recompute-granularity selective "
    return f"{asked}--recompute-modules {'core_attn ' if attention else ''}moe"


def _dense_first(line: Line, _: Sequence[str]) -> str:
    """Return MindSpeed's pattern of layers: dense ones first, then every N-th with experts.

    Layers are numbered from 0. -1 stands for every layer.
    """
    every = abs(int(line.number("--moe-layer-freq", 1))) or 1
    layers, dense = int(line.number("--num-layers", 1)), line.number("--first-k-dense-replace", 0)
    first = min(max(0, int(dense)), layers)
    if every == 1:
        return f"--moe-layer-freq [0]*{first}+[1]*{layers - first}"
    pattern = ["01"[layer >= first and layer % every == 0] for layer in range(layers)]
    return f"--moe-layer-freq [{','.join(pattern)}]"


def _shared_experts(line: Line, values: Sequence[str]) -> str:
    """Return the width of shared experts; one that is as wide as some computes the same."""
    widths = ("--moe-ffn-hidden-size", "--moe-intermediate-size", "--ffn-hidden-size")
    width = next((line.number(name) for name in widths if line.asks(name)), 0.0)
    try:
        return f"--moe-shared-expert-intermediate-size {int(int(values[0]) * width)}"
    except ValueError:
        return f"--moe-shared-expert-intermediate-size {values[0]}"


_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

COMPUTED: Final[Mapping[str, Computed]] = {
    "grouped": _grouped,
    "train_tokens": _train_tokens,
    "decay_tokens": partial(_span, "decay"),
    "warmup_tokens": partial(_span, "warmup"),
    "size_steps": _size_steps,
    "moe_recompute": _moe_recompute,
    "dense_first": _dense_first,
    "shared_experts": _shared_experts,
}
"""The functions that form words, by their names in ``table.txt``."""
