"""Convert plans to and from PyTorch's pipeline schedules (``torch.distributed.pipelining``).

A row of the file is a rank. A cell is an action: the number of the stage, the kind of work and the
microbatch. ``2F0`` is a forward, ``2B0`` a whole backward, ``2I0`` a backward that computes the
input gradient only, and ``2W0`` the weight gradient that ``2I0`` leaves out.
``(2F3;5I1)OVERLAP_F_B`` is a pair of an F and a B; the passes of other pairs stand apart.
``_PipelineScheduleRuntime._load_csv`` reads such a file, adds the communication and runs the
schedule; torchtitan uses it for the file that ``pipeline_parallel_schedule_csv`` names. PyTorch
numbers stages in the order in which the data flows. The rows show on which rank each stage is.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from megatron.schedules.check import check
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan

Action = tuple[int, str, int]
"""Stage, kind of work, microbatch."""
Cell = tuple[Action, ...]
"""An action, or the actions that PyTorch overlaps."""

_ACTION: Final = re.compile(r"(\d{1,9})(F|I|W|B)(\d{1,9})")
_SKIPPED: Final = re.compile(r"\d{1,9}(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d{0,9}")
_OVERLAPPED: Final = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_KINDS: Final[Mapping[str, PassKind]] = {"F": "F", "I": "B", "W": "W", "B": "B"}

TorchtitanSchedule = Literal["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]

OF_TORCHTITAN: Final[Mapping[str, str]] = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}
"""Our schedule for each ``pipeline_parallel_schedule`` of torchtitan, in small letters."""


def to_torch_csv(plan: Plan) -> str:
    """Return a plan as PyTorch's compute-only file, with a row for every rank.

    Args:
        plan: a plan that ``check`` accepts. Its treatment of the vocabulary must be ``none``.

    Raises:
        ValueError: if PyTorch's runtime cannot run the plan: the vocabulary is split over the
            ranks, microbatches are cut into slices, the plan has no backward, it has R passes, or
            the last stage takes the microbatches out of order.
    """
    _refuse_what_torch_lacks(plan)
    kinds = {"F": "F", "B": "I" if plan.split_backward else "B", "W": "W"}

    def cell(rank: int, step: tuple[Pass, ...]) -> str:
        actions = [
            f"{plan.stage_of[rank, item.chunk]}{kinds[item.kind]}{item.microbatch}" for item in step
        ]
        if [item.kind for item in step] == ["F", "B"]:
            return f"({';'.join(actions)})OVERLAP_F_B"
        return ",".join(actions)

    rows = (",".join(cell(rank, step) for step in plan.steps(rank)) for rank in range(plan.ranks))
    return "".join(f"{row}\n" for row in rows)


def from_torch_csv(text: str) -> Plan:
    """Return the checked plan of a file in PyTorch's form, written by any program.

    Empty cells (PyTorch's steps without work), communication and the sharding of parameters are
    skipped: ``lower`` adds what a plan needs. Actions that PyTorch overlaps become a pair. If only
    some backwards are split, each whole backward becomes a B with a W right after it, or after its
    pair. The chunks of a rank are numbered in the order of their stages.

    Args:
        text: the contents of the file, with or without communication.

    Raises:
        ValueError: if a cell is no action, or the rows form no plan; the message names the place.
    """
    cells = [list(_cells(rank, row)) for rank, row in enumerate(csv.reader(text.splitlines()))]
    rows = [[action for cell in row for action in cell] for row in cells]
    if not any(rows):
        raise ValueError("the file has no actions: write a row for every rank, as in 0F0,0B0")
    places = _places(rows)
    splits = any(kind in "IW" for row in rows for _, kind, _ in row)
    passes = tuple(
        tuple(item for cell in row for item in _passes(places, cell, splits)) for row in cells
    )
    pairs = (
        (rank, _passes(places, cell, splits)[0])
        for rank, row in enumerate(cells)
        for cell in row
        if _is_pair(cell)
    )
    plan = Plan(
        rows=passes,
        stages=tuple(places[stage] for stage in sorted(places)),
        microbatches=1 + max(i for row in rows for _, _, i in row),
        pairs=frozenset(pairs),
    )
    check(plan)
    return plan


def torchtitan_schedule(plan: Plan) -> TorchtitanSchedule:
    """Return the ``pipeline_parallel_schedule`` whose stages torchtitan places as ``plan`` does.

    Torchtitan takes the order of the passes from the file, but the places of the stages from the
    name of a schedule.

    Raises:
        ValueError: if torchtitan has no schedule with these places of stages.
    """
    p, stages = plan.ranks, plan.stages
    ranks = [rank for rank, _ in stages]
    if plan.chunks == 1 and ranks == list(range(p)):
        return "1F1B"
    if plan.chunks > 1 and ranks == [stage % p for stage in range(len(stages))]:
        return "Interleaved1F1B"
    if plan.chunks == 2 and ranks == [*range(p), *reversed(range(p))]:
        return "ZBVZeroBubble"
    raise ValueError(
        f"the stages lie on the ranks {' '.join(map(str, ranks[:16]))}: torchtitan places stages "
        "in a loop, or in a V of two chunks a rank; take a schedule that does, or PyTorch's "
        "runtime itself, which reads the places from the file"
    )


def _refuse_what_torch_lacks(plan: Plan) -> None:
    if plan.treatment.is_sharded:
        raise ValueError(
            f"the plan has the vocabulary treatment {plan.treatment.name}: PyTorch's form has no "
            "passes S, T, IF and IB and no collectives, so make the plan with 'none' (each chunk "
            "may still hold a VocabParallelHead over a group of its own), or run this one with "
            "PipelineRunner"
        )
    if plan.slices > 1:
        raise ValueError(
            f"the plan cuts every microbatch into {plan.slices} slices: PyTorch's form has no "
            "slices, and its stages keep no keys and values from one to the next, so make the plan "
            "without --num-seq-splits"
        )
    if plan.recomputes:
        raise ValueError(
            "the plan has passes R: PyTorch's form has none, so make the plan without "
            "--recompute-ahead, and let the backward compute again"
        )
    if plan.forward_only:
        raise ValueError("the plan is 'forward only': PyTorch wants a backward for every forward")
    rank, chunk = plan.stages[-1]
    order = [item.microbatch for item in plan.rows[rank] if (item.kind, item.chunk) == ("F", chunk)]
    if order != sorted(order):
        raise ValueError(
            f"the last stage takes the microbatches in the order {order[:8]}: PyTorch's runtime "
            "counts losses in the order of the forwards and would mix them up"
        )


def _cells(rank: int, row: list[str]) -> Iterator[Cell]:
    """Yield the computations of every cell of a row; of two that overlap, the forward first."""
    for cell in row:
        overlapped = _OVERLAPPED.fullmatch(cell.strip())
        words = overlapped[1].split(";") if overlapped else [cell]
        actions = [action for word in words for action in _action(rank, word.strip())]
        if overlapped:
            actions.sort(key=lambda action: action[1] != "F")
        if actions:
            yield tuple(actions)


def _action(rank: int, text: str) -> Iterator[Action]:
    """Yield the action that a word is, if it is a computation."""
    if not text or _SKIPPED.fullmatch(text):
        return
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(
            f"row {rank}: '{text[:40]}' is no action: write a stage, F, I, W or B, and a "
            "microbatch, as in 2F0"
        )
    stage, kind, microbatch = match.groups()
    yield int(stage), kind, int(microbatch)


def _is_pair(cell: Cell) -> bool:
    return len(cell) == 2 and cell[0][1] == "F" and cell[1][1] in "BI"


def _places(rows: list[list[Action]]) -> dict[int, tuple[int, int]]:
    """Return (rank, chunk) of every stage."""
    found: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for stage, kind, i in row:
            if found.setdefault(stage, rank) != rank:
                raise ValueError(
                    f"row {rank}: {stage}{kind}{i} is of a stage that rank {found[stage]} has"
                )
    missing = next((i for i, stage in enumerate(sorted(found)) if i != stage), None)
    if missing is not None:
        raise ValueError(f"no row has stage {missing}, but one has stage {max(found)}")
    own: dict[int, int] = defaultdict(int)
    places = {}
    for stage in sorted(found):
        rank = found[stage]
        places[stage] = rank, own[rank]
        own[rank] += 1
    return places


def _passes(places: Mapping[int, tuple[int, int]], cell: Cell, splits: bool) -> list[Pass]:
    """Return the passes of a cell; the W of whole backwards come last."""
    passes = [Pass(_KINDS[kind], i, places[stage][1]) for stage, kind, i in cell]
    whole = [Pass("W", i, places[stage][1]) for stage, kind, i in cell if kind == "B" and splits]
    return passes + whole
