"""Jobs with samples of 8k to 1M tokens: the fastest setting that fits, and those without a part.

A setting is a layout of ranks, a number of slices, and what becomes of activations: kept, computed
again, moved to the host, or both. Settings are bounded from below before they are planned, as in a
dry run, and plans have few microbatches (``estimate``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

from megatron.planning.candidate import Candidate
from megatron.planning.run_plan import asked
from megatron.run.recompute import EVERY_LAYER
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import GIB, GPUS
from tools.predictions.scenarios import Scenario

GPU: Final = "H100"
VOCABULARY: Final = 128_256
LENGTHS: Final = {
    "8k": 1 << 13,
    "32k": 1 << 15,
    "128k": 1 << 17,
    "512k": 1 << 19,
    "1M": 1 << 20,
}
TREATMENTS: Final = ("none", "vocab-2")
SLICES: Final = (1, 4)
CHUNKS: Final = 4
"""Model chunks of a rank, under the interleaved schedule."""

SEARCH_SECONDS: Final = 10.0
"""Time of the search for one plan."""


class Layout(NamedTuple):
    """Ranks of a job: pipeline-, context- and data-parallel ones."""

    pipeline: int
    context: int
    replicas: int

    @property
    def words(self) -> str:
        """Its sizes, without those of 1."""
        sizes = {"p": self.pipeline, "c": self.context, "d": self.replicas}
        return ", ".join(f"{name} = {size}" for name, size in sizes.items() if size > 1)


class Job(NamedTuple):
    """A model on GPUs.

    Attributes:
        model: its name.
        tokens: of a batch.
        layouts: ways to spread the model over the GPUs.
    """

    model: str
    tokens: int
    layouts: tuple[Layout, ...]

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        pipeline, context, replicas = self.layouts[0]
        return pipeline * context * replicas


JOBS: Final = (
    Job("8B", 1 << 20, (Layout(8, 1, 1), Layout(4, 2, 1))),
    Job("8B", 1 << 22, (Layout(8, 1, 8), Layout(8, 8, 1))),
)


class Memory(NamedTuple):
    """What becomes of activations between forward and backward."""

    again: bool
    moved: bool

    @property
    def words(self) -> str:
        """Its name in a table."""
        named = ["recomputed"] * self.again + ["on the host"] * self.moved
        return " and ".join(named) or "kept"


MEMORIES: Final = tuple(Memory(again, moved) for again in (False, True) for moved in (False, True))


@dataclass(frozen=True)
class Setting:
    """A way to run a job.

    Attributes:
        job: the job.
        length: tokens of a sample.
        treatment: of the vocabulary.
        layout: ranks.
        slices: of a microbatch.
        memory: what becomes of activations.
    """

    job: Job = field(repr=False)
    length: int
    treatment: str
    layout: Layout
    slices: int
    memory: Memory

    @property
    def scenario(self) -> Scenario:
        """The job as flags of training."""
        layout = self.layout
        more = [
            f"--num-seq-splits {self.slices} --seq-split-strategy balanced" * (self.slices > 1),
            EVERY_LAYER * self.memory.again,
            "--cpu-offload" * self.memory.moved,
        ]
        job = Scenario(self.job.model, GPU, layout.pipeline, layout.replicas, 1, layout.context)
        return job._replace(
            schedule=f"interleaved/{CHUNKS}",
            treatment=self.treatment,
            vocabulary=VOCABULARY,
            seq_length=self.length,
            samples=max(self.job.tokens // self.length, layout.replicas),
            more=" ".join(more),
        )

    @cached_property
    def candidate(self) -> Candidate:
        """The run with its schedule, not planned yet."""
        [found] = asked(self.scenario.config)
        return found

    @cached_property
    def cell(self) -> "Cell | None":
        """The prediction; ``None``: the plan does not fit."""
        found = self.candidate.estimate(Watch(SEARCH_SECONDS), GPUS[GPU])
        if not found.fits:
            return None
        return Cell(
            self.layout,
            self.slices,
            self.memory,
            found.seconds,
            found.mfu,
            found.fullest.peak / GIB,
        )


class Cell(NamedTuple):
    """A setting that fits, with its prediction.

    Attributes:
        layout: ranks.
        slices: of a microbatch.
        memory: what becomes of activations.
        seconds: of an iteration.
        mfu: model FLOPs as a share of the peak rate.
        held: GiB of the fullest rank.
    """

    layout: Layout
    slices: int
    memory: Memory
    seconds: float
    mfu: float
    held: float


PARTS: Final[Mapping[str, Callable[[Setting], bool]]] = {
    "anything": lambda setting: True,
    "slices": lambda setting: setting.slices == 1,
    "context parallelism": lambda setting: setting.layout.context == 1,
    "recomputation": lambda setting: not setting.memory.again,
    "the host": lambda setting: not setting.memory.moved,
}
"""What a run may do without, and the settings that do without it."""

Row = dict[str, dict[str, Cell | None]]
"""By treatment, the fastest setting without each of ``PARTS``; ``None``: no such setting fits."""


def settings(job: Job, length: int, treatment: str) -> list[Setting]:
    """Return all settings of a job whose batch has enough samples for the replicas."""
    samples = job.tokens // length
    return [
        Setting(job, length, treatment, layout, slices, memory)
        for layout in job.layouts
        for slices in SLICES
        for memory in MEMORIES
        if samples % layout.replicas == 0
    ]


def fastest(able: Sequence[Setting]) -> Cell | None:
    """Return the fastest setting that fits, of settings in the order of their least times."""
    best: Cell | None = None
    for setting in able:
        if best is not None and setting.candidate.least_time >= best.seconds:
            break
        found = setting.cell
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    return best


def row_of(job: Job, length: int) -> Row:
    """Return the row of a job with samples of a length."""
    found: Row = {}
    for treatment in TREATMENTS:
        able = [one for one in settings(job, length, treatment) if one.candidate.can_fit]
        able.sort(key=lambda one: one.candidate.least_time)
        found[treatment] = {
            part: fastest([one for one in able if without(one)]) for part, without in PARTS.items()
        }
    return found
