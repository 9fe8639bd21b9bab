"""The schedules by name: how each is made, and how much it promises to hold at most."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from megatron.schedules.blocks.block import Block
from megatron.schedules.blocks.gpipe import gpipe
from megatron.schedules.blocks.interleaved import interleaved
from megatron.schedules.blocks.one_f_one_b import one_f_one_b
from megatron.schedules.blocks.v_shape import v_half, v_min, zb_v
from megatron.schedules.blocks.zero_bubble import zb_h1, zb_h2

PAPER_KEPT: Final = 32 / 74
"""Share of a microbatch's activations that W needs in arXiv 2401.10241 (section 4.1): 32 of
34 + 5 a s / h, at the a s / h = 8 of its models from 6.2B on, whose attention is not flash
attention. ZB-2p counts its limit so; everything else here counts what B leaves as a whole."""

Option = Literal["chunks", "split_backward", "file", "seconds", "shortened"]
"""An option of a request that not every schedule has a use for."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What there is to know of a schedule before its plan is made.

    Attributes:
        chunks: model chunks of a rank; ``None`` where there may be several, as many as the request
            says or as the plan turns out to have.
        split: whether weight gradients are passes of their own, asked for or not.
        kept: share of the activations that counts as held from B to W.
        options: what it has a use for.
        costs_of_rank: its costs are of all chunks of a rank together, else of one chunk.
        needs_memory_limit: it fills the memory that it is given, and has to be given some.
        trainable: all ranks find the same plan.
    """

    chunks: int | None = 1
    split: bool = True
    kept: float = 1.0
    options: frozenset[Option] = frozenset({"split_backward"})
    costs_of_rank: bool = False
    needs_memory_limit: bool = False
    trainable: bool = True


@dataclass(frozen=True)
class Schedule(Traits):
    """A schedule that has a building block.

    Attributes:
        block: makes the block from ranks, microbatches and chunks.
        promise: microbatches in flight at most on any rank, without vocabulary passes, from the
            same three counts.
        searched: the block is one start among others for a search that the costs decide.
    """

    block: Callable[[int, int, int], Block]
    promise: Callable[[int, int, int], float]
    searched: bool = False
    options: frozenset[Option] = field(
        default=frozenset({"chunks", "split_backward", "shortened"}), kw_only=True
    )


SCHEDULES: Final[Mapping[str, Schedule]] = {
    "gpipe": Schedule(lambda p, m, v: gpipe(p, m), lambda p, m, v: m, split=False),
    "1f1b": Schedule(lambda p, m, v: one_f_one_b(p), lambda p, m, v: p, split=False),
    "interleaved": Schedule(
        lambda p, m, v: interleaved(p, v),
        lambda p, m, v: (v - 1) * p / v + (2 * (p - 1) + 1) / v,
        chunks=None,
        split=False,
    ),
    "zb-h1": Schedule(lambda p, m, v: zb_h1(p), lambda p, m, v: p),
    "zb-h2": Schedule(lambda p, m, v: zb_h2(p), lambda p, m, v: 2 * p - 1),
    "zb-1p": Schedule(lambda p, m, v: zb_h1(p), lambda p, m, v: p, searched=True),
    "zb-2p": Schedule(
        lambda p, m, v: zb_h2(p), lambda p, m, v: 2 * p, kept=PAPER_KEPT, searched=True
    ),
    "zb-v": Schedule(lambda p, m, v: zb_v(p), lambda p, m, v: p, chunks=2),
    "v-half": Schedule(lambda p, m, v: v_half(p), lambda p, m, v: p / 2 + 1, chunks=2),
    "v-min": Schedule(lambda p, m, v: v_min(p), lambda p, m, v: p / 3 + 2, chunks=2),
}
"""Name -> schedule, for those with a block."""

TRAITS: Final[Mapping[str, Traits]] = {
    **SCHEDULES,
    "zb-auto": Traits(needs_memory_limit=True),
    "optimal": Traits(options=frozenset({"split_backward", "seconds"}), trainable=False),
    "auto": Traits(chunks=None, costs_of_rank=True),
    "file": Traits(chunks=None, split=False, options=frozenset({"file"})),
}
"""Name -> traits, for all schedules."""

TRAINABLE_SCHEDULES: Final[tuple[str, ...]] = tuple(n for n, t in TRAITS.items() if t.trainable)
"""What ``--pipeline-schedule`` takes."""
CHUNKED_SCHEDULES: Final[tuple[str, ...]] = tuple(
    name for name, schedule in SCHEDULES.items() if schedule.chunks is None
)
"""Those whose ranks have as many chunks as they are told."""
