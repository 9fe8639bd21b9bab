"""Copies to the host and back for which a rank waits at once: those of a warm-up.

``offload`` lets copies run while passes run. Activations whose copy would have no time stay on the
device. The single microbatch of a warm-up leaves little time. Its activations, those of all slices
in all chunks of a rank, may take more memory than a training iteration, which moves nearly all of
them. So a warm-up moves what training moves, and waits.
"""

from collections.abc import Collection, Sequence
from typing import Literal

from megatron.schedules.lower import Instruction, Program, Run, Start, Wait
from megatron.schedules.needs import Comm
from megatron.schedules.passes import Pass


def with_copies_at_once(program: Program, training: Program) -> Program:
    """Return a program without copies, with the copies that ``training`` makes on the same ranks.

    Activations of a stage and slice are moved if ``training`` moves those of any microbatch. O is
    right after the F, and L right before the first pass that reads the activations.
    """
    rows = []
    for rank, row in enumerate(program.rows):
        moved = {(comm.stage, comm.slice) for comm in training.copies(rank)}
        rows.append(tuple(_with_copies(program, rank, row, moved)))
    return Program(program.plan, tuple(rows), program.shares)


def _with_copies(
    program: Program, rank: int, row: Sequence[Instruction], moved: Collection[tuple[int, int]]
) -> list[Instruction]:
    plan, made = program.plan, list[Instruction]()
    reader = "R" if plan.recomputes else "B"

    def copy(kind: Literal["O", "L"], item: Pass) -> list[Instruction]:
        stage = plan.stage_of[rank, item.chunk]
        if (stage, item.slice) not in moved:
            return []
        comm = Comm(kind, item.microbatch, stage, item.slice)
        return [Start(comm), Wait(comm)]

    for step in row:
        items = step.passes if isinstance(step, Run) else ()
        for item in items:
            made += copy("L", item) if item.kind == reader else []
        made.append(step)
        for item in items:
            made += copy("O", item) if item.kind == "F" else []
    return made
