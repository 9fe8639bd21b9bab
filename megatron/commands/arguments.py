"""Flags that several commands share: of a plan, of the window of a picture, and of its file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import COUNT, SECONDS
from megatron.native.files import replace_text, write_text
from megatron.schedules.block_options import BlockOptions
from megatron.schedules.catalogue import CHUNKED_SCHEDULES, SCHEDULE_NAMES
from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.plan_file import load_any_plan, treatments_of
from megatron.schedules.plan_flags import PLAN_FLAGS
from megatron.schedules.request import DEFAULT_SECONDS, VOCABULARY_TREATMENTS, Request
from megatron.simulator.draw.picture import Picture
from megatron.simulator.draw.stretches import WHOLE, Window
from megatron.simulator.draw.svg import paint_svg

DEFAULTS: Final[Mapping[str, Any]] = {
    "schedule": "1f1b",
    "vocabulary": "none",
    "ranks": 4,
    "microbatches": 8,
}
"""The plan that the commands take if neither the flags nor a plan's file say something else."""


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class SizeFlags:
    """Size of the plan."""

    pipeline_model_parallel_size: int | None = flag(None, "Pipeline ranks.", COUNT, metavar="P",
        names=("-p", *PLAN_FLAGS["ranks"][1:]),
        unset=f"{DEFAULTS['ranks']}, or those of --schedule-file")
    microbatches: int | None = flag(None, "Microbatches of an iteration.", COUNT, metavar="M",
        names=("-m",), unset=f"{DEFAULTS['microbatches']}, or those of --schedule-file")


@dataclass(frozen=True)
class PlanFlags:
    """The plan."""

    pipeline_schedule: str | None = flag(None, f"{', '.join(SCHEDULE_NAMES)}.", metavar="NAME",
        choices=SCHEDULE_NAMES, names=PLAN_FLAGS["schedule"][1:],
        unset=f"file with --schedule-file, else {DEFAULTS['schedule']}")
    vocab_parallel: str | None = flag(None, f"{', '.join(VOCABULARY_TREATMENTS)}.",
        metavar="TREATMENT", choices=tuple(VOCABULARY_TREATMENTS),
        names=PLAN_FLAGS["vocabulary"][1:],
        unset=f"{DEFAULTS['vocabulary']}, or that of --schedule-file")
    num_virtual_stages_per_pipeline_rank: int | None = flag(None,
        f"Model chunks of a rank, for {' or '.join(CHUNKED_SCHEDULES)}.", COUNT, metavar="CHUNKS",
        names=("-v", *PLAN_FLAGS["chunks"][1:]), unset="the schedule's")
    num_seq_splits: int | None = flag(None,
        "Slices into which every microbatch is cut along its sequence.", COUNT, metavar="SLICES",
        names=PLAN_FLAGS["slices"][1:], unset="1, or those of --schedule-file")
    zero_bubble_max_pending_backward: float | None = flag(None,
        "Microbatches of a rank that may be in flight.", COUNT, metavar="MICROBATCHES",
        names=PLAN_FLAGS["memory_limit"][1:], unset="the schedule's")
    schedule_file: Path | None = flag(None,
        "A plan in text form, as --save-plan of simulate-schedule writes it.",
        names=PLAN_FLAGS["file"][1:], unset="none")
    recompute_ahead: int | None = flag(None,
        "What B computes again becomes a pass of its own, R, which need not wait for the gradient; "
        "a rank may hold so many chunks between R and B.", COUNT, metavar="CHUNKS",
        unset="within B")
    split_backward: bool = flag(False, "Make W a pass of its own.")
    overlap_moe_expert_parallel_comm: bool = flag(False,
        "Join each F with a B that stands near it, where the plan does not become longer. In a "
        "pair, each pass works while the other one waits (--waits). A rank may hold one "
        "microbatch more, or as many as the memory limit allows.")
    search_seconds: float | None = flag(None,
        "Time to look for the plan; then the best so far is taken.", SECONDS,
        names=PLAN_FLAGS["seconds"][1:],
        unset=f"no limit; for --pipeline-schedule optimal {DEFAULT_SECONDS:g}")
# fmt: on

PLAN_GROUPS: Final = (SizeFlags, PlanFlags, BlockOptions)
"""All flags of a plan."""


def request_of(flags: Flags, costs: Costs = UNIT_COSTS) -> Request:
    """Return the plan that the flags of ``PLAN_GROUPS`` ask for.

    Values that the flags leave out come from the plan's file, if there is a file, or from
    ``DEFAULTS``.

    Raises:
        ValueError: if the file holds no plan that can be run, or the flags make no request.
    """
    size, plan = flags[SizeFlags], flags[PlanFlags]
    asked = {
        "schedule": plan.pipeline_schedule,
        "vocabulary": plan.vocab_parallel,
        "ranks": size.pipeline_model_parallel_size,
        "microbatches": size.microbatches,
        "chunks": plan.num_virtual_stages_per_pipeline_rank,
        "slices": plan.num_seq_splits,
        "memory_limit": plan.zero_bubble_max_pending_backward,
        "split_backward": plan.split_backward or None,
        "file": plan.schedule_file,
        "seconds": plan.search_seconds,
        "recompute_ahead": plan.recompute_ahead,
        "joined": plan.overlap_moe_expert_parallel_comm or None,
        "options": flags[BlockOptions],
    }
    given = {field: value for field, value in asked.items() if value is not None}
    return Request(costs=costs, **{**DEFAULTS, **_of_file(plan.schedule_file), **given})


def _of_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    plan = load_any_plan(path)
    return {
        "schedule": "file",
        "vocabulary": treatments_of(plan)[0],
        "ranks": plan.ranks,
        "microbatches": plan.microbatches,
        "slices": plan.slices,
    }


def window_flag(drawings: str) -> Window:
    """Declare ``--window``.

    Args:
        drawings: a condition that names the flags that draw. If none of them is given, a window is
            a mistake.
    """
    shown = (
        "Draw this part only: FROM:TO in the unit of the times, counted from the first start, as "
        "1.5:3; or mFROM:mTO, from the first microbatch's first pass to the last one's last, as "
        "m8:m15; any of the numbers may be left out."
    )
    return flag(
        WHOLE,
        shown,
        metavar="FROM:TO",
        reads=Window.parse,
        unset="all of it",
        needs=drawings,
        lack="is the part to draw",
    )


def picture_flag(help: str) -> Path | None:
    """Declare ``--draw``."""
    return flag(None, help, metavar="FILE.svg", reads=_picture_file, unset="none")


def _picture_file(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".svg":
        raise ValueError("end it in .svg")
    return path


def write_picture(picture: Picture, path: Path, *, is_own_name: bool = False) -> None:
    """Write ``picture`` as SVG.

    Args:
        picture: the picture.
        path: the file.
        is_own_name: whether the command made the name up, so that a link of this name is replaced.

    Raises:
        OSError: if the file cannot be written.
    """
    write = replace_text if is_own_name else write_text
    write(path, paint_svg(picture))
