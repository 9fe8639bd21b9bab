"""The schedules by name: how each is made, and how many microbatches it holds at most."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import Any, Final, Literal, NamedTuple

from megatron.flags.declare import option_of
from megatron.schedules.blocks.block import Block
from megatron.schedules.blocks.dualpipe_v import dualpipe_v
from megatron.schedules.blocks.gis import entries, gis, gis_h, half_of, pipeoffload
from megatron.schedules.blocks.gpipe import gpipe
from megatron.schedules.blocks.hanayo import hanayo
from megatron.schedules.blocks.interleaved import interleaved
from megatron.schedules.blocks.one_f_one_b import one_f_one_b
from megatron.schedules.blocks.one_f_one_b_v import one_f_one_b_v
from megatron.schedules.blocks.v_shape import v_half, v_min, zb_v
from megatron.schedules.blocks.zero_bubble import zb_h1, zb_h2
from megatron.schedules.counted import counted
from megatron.schedules.plan_flags import PLAN_FLAGS

PAPER_KEPT: Final = 32 / 74
"""Share of a microbatch's activations that W needs in arXiv 2401.10241 (section 4.1):
32 / (34 + 5 a s / h) without flash attention, with a s / h = 8 as in its models from 6.2B on. Only
the limit of ZB-2p is counted with this share. All other schedules count the activations between B
and W in full."""

OptionName = Literal["chunks", "split_backward", "file", "seconds", "shortened"]
"""An option of a request that only some schedules take: the name of a field of ``Request``."""


class Option(NamedTuple):
    """An option that only some schedules take.

    Attributes:
        unused: why the other schedules have no use for it; {} stands for the schedules that do.
        flag: the flag of training that gives it; empty: no flag of training is for these schedules
            alone.
    """

    unused: str
    flag: str = ""


OPTIONS: Final[Mapping[OptionName, Option]] = {
    "chunks": Option("its plans have a number of their own; {} takes one", PLAN_FLAGS["chunks"][0]),
    "split_backward": Option("its plan has W passes or not; 'auto' takes a request for them"),
    "file": Option("a plan file goes with the schedule 'file'", PLAN_FLAGS["file"][0]),
    "seconds": Option("only 'optimal' searches for as long as it may"),
    "shortened": Option(
        "only the plan of a schedule with a block can stay in the order of the block"
    ),
}
"""Name -> option, for the options of a request that only some schedules take, besides those that
blocks are made with (``BlockOptions``)."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The facts about a schedule that are known before its plan is made.

    Attributes:
        description: a few words about it, for tables and help.
        paper: where it was published.
        title: its name in that paper.
        chunks: the least number of model chunks per rank; also the default.
        chunk_step: a rank may have ``chunks`` plus a multiple of this number of chunks; 0 if a rank
            always has ``chunks``.
        split: whether weight gradients are always separate passes.
        kept: share of the activations that counts as held from B to W.
        options: the options of a request that it takes.
        compares: whether it takes the best of several schedules. If so, a request gives the costs
            of all chunks of a rank together; otherwise the costs of one chunk.
        needs_memory_limit: whether a request must give a memory limit, because the schedule fills
            all memory that is allowed.
        trainable: whether all ranks find the same plan, so that a training run can use it.
        pairs: whether its forwards stand beside backwards, so that a plan can join them in pairs.
    """

    description: str
    paper: str = ""
    title: str = ""
    chunks: int = 1
    chunk_step: int = 0
    split: bool = True
    kept: float = 1.0
    options: frozenset[OptionName] = frozenset({"split_backward"})
    compares: bool = False
    needs_memory_limit: bool = False
    trainable: bool = True
    pairs: bool = False

    @property
    def takes_chunks(self) -> bool:
        """Whether a request may choose the number of chunks per rank."""
        return self.chunk_step > 0

    @property
    def block_options(self) -> tuple[str, ...]:
        """The fields of ``BlockOptions`` that it takes."""
        return ()

    @property
    def flags(self) -> frozenset[str]:
        """The flags of ``OPTION_FLAGS`` that it takes."""
        own = self.options if self.takes_chunks else self.options - {"chunks"}
        of_block = map(option_of, self.block_options)
        return frozenset((*(OPTIONS[name].flag for name in own), *of_block)) - {""}

    def chunks_fault(self, chunks: int) -> str | None:
        """Return the reason why a rank cannot have so many chunks, or ``None`` if it can.

        The text is the rest of a sentence that begins with the schedule's name.
        """
        if not self.takes_chunks:
            others = " or ".join(CHUNKED_SCHEDULES)
            own = counted(self.chunks, "chunk a rank")
            fault = f"has {own}, not {chunks}: {others} can have more"
            return None if chunks == self.chunks else fault
        steps, rest = divmod(chunks - self.chunks, self.chunk_step)
        if steps >= 0 and not rest:
            return None
        first = [self.chunks + i * self.chunk_step for i in range(3)]
        below = self.chunks + steps * self.chunk_step
        ways = [str(below), str(below + self.chunk_step)] if steps >= 0 else [str(self.chunks)]
        return (
            f"takes {', '.join(map(str, first))}, ... chunks a rank, not {chunks}: take "
            f"{' or '.join(ways)}"
        )


@dataclass(frozen=True, kw_only=True)
class Schedule(Traits):
    """A schedule that has a building block.

    Attributes:
        block: makes the block from ranks, microbatches and chunks.
        promise: the most microbatches in flight on any rank, without vocabulary passes, as a
            function of the same three counts.
        searched: whether the plan comes from a search with the costs; the block is then only one of
            the plans from which the search starts.
        fills: whether the schedule uses a memory limit above the promise for a shorter plan. Its
            plan may then hold as many microbatches as the limit allows.
        bubble_free: whether no rank idles between its first and its last pass, if passes of all
            kinds take equally long.
        with_options: makes the same schedule with other options. Its arguments are the fields of
            ``BlockOptions`` that the schedule takes, with the same defaults. ``None``: it takes
            none of them.
    """

    block: Callable[[int, int, int], Block]
    promise: Callable[[int, int, int], float]
    searched: bool = False
    fills: bool = False
    bubble_free: bool = False
    with_options: "Callable[..., Schedule] | None" = None
    options: frozenset[OptionName] = field(
        default=frozenset({"chunks", "split_backward", "shortened"}), kw_only=True
    )

    @property
    def block_options(self) -> tuple[str, ...]:
        """The fields of ``BlockOptions`` that it takes."""
        return () if self.with_options is None else tuple(signature(self.with_options).parameters)

    def made_with(self, values: Mapping[str, Any]) -> "Schedule":
        """Return the same schedule with the values of some of its ``block_options``."""
        if self.with_options is None or not values:
            return self
        return self.with_options(**values)

    def rough_bubble(self, ranks: int, chunks: int, microbatches: int) -> float:
        """Return about how many microbatches would fill a rank's idle time in an iteration.

        1F1B idles for p - 1 microbatches, in chunks for their part of them (arXiv 2104.04473,
        section 2.2); with W apart, W fills two thirds (arXiv 2401.10241, section 2.3). An iteration
        takes at least as long as one microbatch takes through all stages: p microbatches' work of a
        rank, or with W apart two thirds of p, because no stage waits for W. So a schedule without
        bubbles idles, too, if there are fewer microbatches.
        """
        chain = 2 * ranks / 3 if self.split else ranks
        steady = 0.0 if self.bubble_free else (ranks - 1) / (3 if self.split else chunks)
        return max(steady, chain - microbatches)


@cache  # plans of one schedule are found again by it
def _interleaved(microbatch_group_size_per_virtual_pipeline_stage: int | None = None) -> Schedule:
    """Return interleaved 1F1B in groups of so many microbatches; ``None``: of p."""
    group = microbatch_group_size_per_virtual_pipeline_stage

    def size(p: int, m: int) -> int:
        """Return the microbatches of a full group; there are no more than all of them."""
        return p if group is None else min(group, max(m, p))

    return Schedule(
        title="Interleaved 1F1B",
        description="1F1B of v chunks a rank",
        paper="arXiv 2104.04473",
        block=lambda p, m, v: interleaved(p, v, size(p, m)),
        promise=lambda p, m, v: ((v - 1) * size(p, m) + 2 * (p - 1) + 1) / v,
        chunks=2,
        chunk_step=1,
        split=False,
        with_options=_interleaved,
    )


SCHEDULES: Final[Mapping[str, Schedule]] = {
    "gpipe": Schedule(
        title="GPipe",
        description="all forwards, then all backwards",
        paper="arXiv 1811.06965",
        block=lambda p, m, v: gpipe(p, m),
        promise=lambda p, m, v: m,
        split=False,
    ),
    "1f1b": Schedule(
        title="1F1B",
        description="one F and one B by turns (PipeDream-flush)",
        paper="arXiv 2104.04473",
        block=lambda p, m, v: one_f_one_b(p),
        promise=lambda p, m, v: p,
        split=False,
    ),
    "interleaved": _interleaved(),
    "hanayo": Schedule(
        title="Hanayo",
        description="a microbatch goes down the ranks and up again (one wave), v / 2 times",
        paper="arXiv 2308.15762",
        block=lambda p, m, v: hanayo(p, v),
        promise=lambda p, m, v: p,
        chunks=2,
        chunk_step=2,
        split=False,
    ),
    "1f1b-v": Schedule(
        title="1F1B-V",
        description="1F1B in a V shape, with two thirds of the memory of 1F1B",
        paper="arXiv 2405.15362",
        block=lambda p, m, v: one_f_one_b_v(p),
        promise=lambda p, m, v: 2 * p / 3 + 1,
        chunks=2,
        split=False,
    ),
    "zb-h1": Schedule(
        title="ZB-H1",
        description="B and W apart, memory of 1F1B; a small bubble is left",
        paper="arXiv 2401.10241",
        block=lambda p, m, v: zb_h1(p),
        promise=lambda p, m, v: p,
    ),
    "zb-h2": Schedule(
        title="ZB-H2",
        description="no bubble, twice the memory; shorter than `zb-h1` if iterations overlap",
        paper="arXiv 2401.10241",
        block=lambda p, m, v: zb_h2(p),
        promise=lambda p, m, v: 2 * p - 1,
        bubble_free=True,
    ),
    "zb-1p": Schedule(
        title="ZB-1p",
        description="found by a search that knows the time of each pass; at most p in flight",
        paper="arXiv 2401.10241",
        block=lambda p, m, v: zb_h1(p),
        promise=lambda p, m, v: p,
        searched=True,
    ),
    "zb-2p": Schedule(
        title="ZB-2p",
        description="found by a search that knows the time of each pass; at most 2p in flight",
        paper="arXiv 2401.10241",
        block=lambda p, m, v: zb_h2(p),
        promise=lambda p, m, v: 2 * p,
        kept=PAPER_KEPT,
        searched=True,
        bubble_free=True,
    ),
    "zb-v": Schedule(
        title="ZB-V",
        description="V shape without a bubble",
        paper="arXiv 2401.10241",
        block=lambda p, m, v: zb_v(p),
        promise=lambda p, m, v: p,
        chunks=2,
        fills=True,
        bubble_free=True,
    ),
    "v-half": Schedule(
        title="V-Half",
        description="V shape, half the memory",
        paper="arXiv 2405.15362",
        block=lambda p, m, v: v_half(p),
        promise=lambda p, m, v: (p + 2) // 2,
        chunks=2,
        fills=True,
    ),
    "v-min": Schedule(
        title="V-Min",
        description="V shape, a third of the memory",
        paper="arXiv 2405.15362",
        block=lambda p, m, v: v_min(p),
        promise=lambda p, m, v: (p + 4) // 3,
        chunks=2,
        fills=True,
    ),
    "dualpipe-v": Schedule(
        title="DualPipeV",
        description="V shape; after the warm-up every F has a B next to it",
        paper="arXiv 2412.19437",
        block=lambda p, m, v: dualpipe_v(p),
        promise=lambda p, m, v: p + 0.5,
        chunks=2,
        pairs=True,
        bubble_free=True,
    ),
    "gis": Schedule(
        title="GIS",
        description="`interleaved` with B and W apart and the memory of 1F1B",
        paper="arXiv 2503.01328",
        block=lambda p, m, v: gis(p, v),
        promise=lambda p, m, v: p,
        chunks=2,
        chunk_step=1,
    ),
    "gis-h": Schedule(
        title="GIS-H",
        description="`gis` in groups of p/2 microbatches: half the memory, if a rank has many "
        "chunks",
        paper="arXiv 2503.01328",
        block=lambda p, m, v: gis_h(p, v),
        promise=lambda p, m, v: ((v - 1) * half_of(p) + p) / v,
        chunks=2,
        chunk_step=1,
    ),
    "pipeoffload": Schedule(
        title="PipeOffload",
        description="`gis-h` without groups, made to offload activations to the memory of the CPUs",
        paper="arXiv 2503.01328",
        block=lambda p, m, v: pipeoffload(p, v),
        promise=lambda p, m, v: (entries(p, v)[-1] + p) / v,
        chunks=2,
        chunk_step=1,
    ),
}
"""Name -> schedule, for all schedules that have a block."""

TRAITS: Final[Mapping[str, Traits]] = {
    **SCHEDULES,
    "zb-auto": Traits(
        description="found by a search that knows the time of each pass; at most a given number "
        "in flight",
        needs_memory_limit=True,
    ),
    "optimal": Traits(
        description="the shortest plan that OR-Tools CP-SAT finds, with the lower bound that it "
        "proves",
        options=frozenset({"split_backward", "seconds"}),
        trainable=False,
    ),
    "auto": Traits(description="the fastest of all that fit a memory limit", compares=True),
    "file": Traits(
        description="your own plan in text form, checked",
        split=False,
        options=frozenset({"file"}),
    ),
}
"""Name -> traits, for all schedules."""

OPTION_FLAGS: Final[tuple[str, ...]] = (
    *(own.flag for own in OPTIONS.values() if own.flag),
    *dict.fromkeys(option_of(name) for own in TRAITS.values() for name in own.block_options),
)
"""The flags of training that only some schedules take."""

SCHEDULE_NAMES: Final[tuple[str, ...]] = tuple(TRAITS)
TRAINABLE_SCHEDULES: Final[tuple[str, ...]] = tuple(n for n, t in TRAITS.items() if t.trainable)
"""The names that ``--pipeline-schedule`` takes."""
CHUNKED_SCHEDULES: Final[tuple[str, ...]] = tuple(n for n, t in TRAITS.items() if t.takes_chunks)
"""The schedules for which a request may choose the number of chunks per rank."""
PAIRED_SCHEDULES: Final[tuple[str, ...]] = tuple(n for n, t in TRAITS.items() if t.pairs)
"""The schedules that are made for pairs."""
TRIED_FIRST: Final = ("zb-v", "interleaved", "dualpipe-v", "1f1b", "zb-h1", "v-half", "v-min")
"""Schedules that stand for all others while layouts are compared: fast ones and small ones."""
OF_EVERY_SHAPE: Final = ("1f1b", "interleaved", "zb-v")
"""A schedule of every shape: a chunk for each rank, chunks in a circle, and chunks in a V."""


def takers(flag: str) -> tuple[str, ...]:
    """Return the names of the schedules that take a flag of ``OPTION_FLAGS``."""
    return tuple(name for name, own in TRAITS.items() if flag in own.flags)


def without_bubble(*, in_chunks: bool) -> str:
    """Return the schedule to try after ``1f1b``: with W apart, and in chunks if layers allow it."""
    return "zb-v" if in_chunks else "zb-h1"


def compared_schedules(memory_limit: float | None) -> tuple[str, ...]:
    """Return the names of the schedules that ``auto`` compares.

    Args:
        memory_limit: microbatches that a rank may hold. It is compared with the microbatches that a
            plan really holds, not with the schedule's promise or with its ``kept`` share.
    """
    filling = (name for name, known in TRAITS.items() if known.needs_memory_limit)
    return (*SCHEDULES, *(() if memory_limit is None else filling))
