"""A training run as its records tell it: tables of figures, restarts, and the newest values.

A restart goes back to a checkpoint. The rows after it are dropped, because the run repeats these
iterations, and the repetition counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import nan
from typing import Any, Final

from megatron.commands.watching.record import (
    Record,
    interval_values,
    number,
    part,
    ranks_of,
    seconds_of,
    slowest_facts,
    texts_of,
    word,
)
from megatron.commands.watching.table import Table

MOST_RESTARTS: Final = 1000
"""Restarts that are kept; the earliest of more are only counted."""

MOST_GENERATIONS: Final = 20
"""Iterations of a run whose texts are kept: the last ones."""

_MOST_SLOWEST: Final = 10_000
"""Ranks whose coordinates are kept."""

_MOST_SETS: Final = 64
"""Sets of evaluations that are kept."""

_LAYOUT: Final = {
    "pipeline": (("pipeline", "pipeline_model_parallel_size"), ("pipeline_size",)),
    "tensor": (("tensor", "tensor_model_parallel_size"), ("tensor_size",)),
    "context": (("context", "context_parallel_size"), ("context_size",)),
    "replicas": (("replicas", "size"),),
    "expert": (("experts", "expert_model_parallel_size"),),
}
"""Kind of ranks -> where a configuration tells how many there are; earlier versions' place last."""


@dataclass(frozen=True)
class Restart:
    """The start of processes that go on with a run.

    Attributes:
        iteration: iterations that were finished before.
        reached: the last iteration of which the earlier processes have a record.
        hours: since the start of the run.
    """

    iteration: int
    reached: int
    hours: float


@dataclass(frozen=True)
class Written:
    """Texts that the model has written after an iteration, each with its prompt."""

    iteration: int
    texts: list[dict[str, str]]


@dataclass
class Run:
    """A run.

    Attributes:
        name: of its file.
        key: its id.
        intervals: a row for every record of iterations.
        evaluations: rows by the name of the data.
        restarts: of its processes.
        starts: how often its processes have started.
        facts: of the last start: sizes, and the layout.
        ranks: figures of the ranks in the newest interval that has some.
        layers: figures of the layers with experts, as ``ranks``.
        written: texts, by iteration.
        slowest: by rank, the coordinates and passes of ranks that have been the slowest ones.
        began: seconds since 1970 of the first record.
        latest: the same of the last record.
        has_ended: whether the last processes have ended in good order.
    """

    name: str
    key: str
    intervals: Table = field(default_factory=Table)
    evaluations: dict[str, Table] = field(default_factory=dict)
    restarts: list[Restart] = field(default_factory=list)
    starts: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    ranks: list[Record] = field(default_factory=list)
    layers: list[Record] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    slowest: dict[float, dict[str, Any]] = field(default_factory=dict)
    began: float = nan
    latest: float = nan
    has_ended: bool = False

    def take(self, record: Record) -> None:
        """Take a record."""
        seconds = seconds_of(record)
        if seconds == seconds:
            self.began = seconds if self.began != self.began else self.began
            self.latest = seconds
        event = record["event"]
        self.has_ended = event == "end"
        if event == "start":
            self._start(record)
        elif event == "iterations":
            self._interval(record)
        elif event == "evaluation":
            self._evaluation(record)
        elif event == "generation":
            self._forget_texts(record["iteration"] - 1)
            self.written.append(Written(record["iteration"], texts_of(record)))
            del self.written[:-MOST_GENERATIONS]

    @property
    def reached(self) -> int:
        """The last iteration of which there is a record."""
        return self.intervals.iterations[-1] if len(self.intervals) else 0

    def hours(self) -> float:
        """Return the hours from the first record to the last one."""
        return (self.latest - self.began) / 3600

    def _start(self, record: Record) -> None:
        iteration = record["iteration"]
        self.starts += 1
        if self.starts > 1:
            self.restarts.append(Restart(iteration, self.reached, self.hours()))
            del self.restarts[:-MOST_RESTARTS]
        for table in (self.intervals, *self.evaluations.values()):
            table.cut(iteration)
        self._forget_texts(iteration)
        self.facts = dict(_facts(record))

    def _forget_texts(self, iteration: int) -> None:
        """Forget the texts after an iteration, which the run repeats."""
        while self.written and self.written[-1].iteration > iteration:
            self.written.pop()

    def _interval(self, record: Record) -> None:
        values = interval_values(record)
        values["hours"] = self.hours()
        if "consumed_tokens" in values:
            values["tokens"] = values["consumed_tokens"]
        self.intervals.put(record["iteration"], values)
        self.ranks = ranks_of(record) or self.ranks
        if (rank := values.get("slowest rank", nan)) == rank and (
            rank in self.slowest or len(self.slowest) < _MOST_SLOWEST
        ):
            self.slowest[rank] = slowest_facts(record)
        layers = record.get("layers")
        if isinstance(layers, list) and layers:
            self.layers = [own for own in layers if isinstance(own, dict)]

    def _evaluation(self, record: Record) -> None:
        name = word(record.get("dataset"), "unnamed")
        if name not in self.evaluations and len(self.evaluations) >= _MOST_SETS:
            return
        samples, length = number(record.get("consumed_samples")), self.facts.get("seq_length", nan)
        values = {
            "lm_loss": number(record.get("lm_loss")),
            "seconds": number(record.get("seconds")),
            "tokens": samples * length,
            "hours": self.hours(),
        }
        self.evaluations.setdefault(name, Table()).put(record["iteration"], values)


def _facts(record: Record) -> Iterator[tuple[str, Any]]:
    """Yield the facts of a start that the page shows."""
    for name in ("train_iters", "world_size", "parameters", "flops", "peak_tflops"):
        yield name, number(record.get(name))
    yield "planned_idle", number(record.get("planned_idle"))
    yield "seq_length", number(part(record, "config", "model", "seq_length"))
    sizes = {
        kind: int(size)
        for kind, places in _LAYOUT.items()
        for at in places
        if (size := number(part(record, "config", "parallel", *at))) > 1
    }
    yield "layout", sizes
    for node, name in (("schedule", "pipeline_schedule"), ("treatment", "vocab_parallel")):
        earlier = part(record, "config", "parallel", name)  # where earlier versions had it
        yield name, word(part(record, "config", "parallel", node, name) or earlier)
