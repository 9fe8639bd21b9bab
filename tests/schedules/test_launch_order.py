"""On GPUs nothing overtakes: a program must end on queues that only ever run their first entry.

NCCL is stricter than gloo. The host issues everything at once. Passes run one after another, and
so do the communications of one communicator (here X, G, and all collectives; fewer than there are);
a communication occupies the queue until all its ranks have come to it; and in NCCL's implicit order
none is launched before those that its host has issued earlier, whichever communicator they are on.
"""

from itertools import pairwise

import pytest
from harness.properties import examples
from hypothesis import given, settings
from schedules.cases import random_costs, seeds
from schedules.test_lower import plans

from megatron.schedules.lower import Program, Run, Start, Wait, lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import Comm, participants
from megatron.schedules.plan import Plan


class Gpu:
    """What one rank's device has done of its program."""

    def __init__(self, program: Program, rank: int) -> None:
        self.row = program.rows[rank]
        self.issued = [(n, s.comm) for n, s in enumerate(self.row) if isinstance(s, Start)]
        self.passed = 0  # instructions that are behind the stream of the passes
        self.launched: list[Comm] = []

    def go_on(self, done: set[Comm]) -> bool:
        """Go on as far as ``done`` lets it; tell whether there was anything to do."""
        before = self.passed, len(self.launched)
        while self.passed < len(self.row) and self._is_free(self.row[self.passed], done):
            self.passed += 1
        for position, comm in self.issued[len(self.launched) :]:
            queue = [c for c in self.launched if communicator(c) == communicator(comm)]
            if position >= self.passed or not done.issuperset(queue[-1:]):
                break
            self.launched.append(comm)
        return (self.passed, len(self.launched)) != before

    @staticmethod
    def _is_free(step: Run | Start | Wait, done: set[Comm]) -> bool:
        return not isinstance(step, Wait) or step.comm in done


def communicator(comm: Comm) -> str:
    return comm.kind if comm.kind in ("X", "G") else "vocabulary"


def ends(program: Program) -> bool:
    """Whether all GPUs come to the end."""
    gpus = [Gpu(program, rank) for rank in range(program.plan.ranks)]
    done: set[Comm] = set()
    while any(gpu.go_on(done) for gpu in gpus):
        for comm in {comm for gpu in gpus for comm in gpu.launched} - done:
            if all(comm in gpus[rank].launched for rank in participants(program.plan, comm)):
                done.add(comm)
    return all(gpu.passed == len(gpu.row) for gpu in gpus)


@settings(max_examples=examples(40))
@given(plans, seeds)
def test_every_program_ends(plan: Plan, seed: int) -> None:
    assert ends(lower(plan, random_costs(seed, plan.ranks, plan.chunks)))


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_that_disagree_on_the_order_would_not(rank: int) -> None:
    program = lower(make_plan("1f1b", "vocab-2", 2, 4))
    row = list(program.rows[rank])
    starts = [(n, step.comm) for n, step in enumerate(row) if isinstance(step, Start)]
    one, other = next(
        (a, b)
        for (a, comm), (b, next_comm) in pairwise(starts)
        if communicator(comm) == communicator(next_comm)
    )
    row[one], row[other] = row[other], row[one]
    rows = list(program.rows)
    rows[rank] = tuple(row)
    assert ends(program)
    assert not ends(Program(program.plan, tuple(rows)))
