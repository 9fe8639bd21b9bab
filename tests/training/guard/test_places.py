"""Which rank holds up a job: the one that waits for nobody, or does not answer."""

from dataclasses import replace

import pytest
import torch
from correctness.rank_runs import CPU

from megatron.parallel.grid import Grid
from megatron.parallel.groups import Groups, connect_grid
from megatron.runtime.device_progress import DeviceError, DevicePlace, DeviceProgress
from megatron.runtime.position import Position, last_pass_of
from megatron.schedules.lower import Run, Start, Wait, lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import Comm
from megatron.training.guard.entered import Entered
from megatron.training.guard.places import Place, hang, place_of, table

PROGRAM = lower(make_plan("1f1b", "vocab-2", 4, 8))
GRID = Grid(data_size=2, pipeline_size=4)

RUNS = Place("iteration 7", "runs F3", (), "F2", (7, 20), idle=400.0, gives_up=300.0)
WAITS = replace(RUNS, instruction="X3 from 0", awaits=(0,))
BETWEEN = replace(RUNS, instruction="")


def groups_of(rank: int) -> Groups:
    """The view of a rank of two replicas, without process groups."""
    return connect_grid(GRID, rank, CPU, (0, 0), lambda use, tiling: None)


def test_a_place_survives_its_way_through_the_store() -> None:
    for place in (RUNS, WAITS, BETWEEN, in_collective(RUNS, 8, waits=True)):
        assert Place.from_text(place.to_text()) == place


def position_at(rank: int, instruction: Run | Start | Wait) -> Position:
    position = Position()
    position.enter("iteration 7")
    row = position.begin(PROGRAM, rank)  # as tuples, a Start and its Wait are equal
    position.at = [(type(step), step) for step in row].index((type(instruction), instruction))
    return position


@pytest.mark.parametrize(
    ("pipeline_rank", "comm", "awaits"),
    [
        (2, Comm("X", 3, 1), (3,)),  # stage 1 of replica 1 is rank 3 of the job
        (1, Comm("X", 3, 1), (5,)),
        (2, Comm("G", 3, 3), (7,)),
        (2, Comm("C1", 3), (1, 3, 7)),
    ],
)
def test_who_is_waited_for_follows_from_the_communication(
    pipeline_rank: int, comm: Comm, awaits: tuple[int, ...]
) -> None:
    """In the second of two replicas, whose ranks are 1, 3, 5 and 7."""
    rank = GRID.groups("pipeline")[1][pipeline_rank]
    position = position_at(pipeline_rank, Wait(comm))
    place = place_of(position, groups_of(rank), 5.0, 9.0)
    assert place.awaits == awaits
    assert place.instruction == str(comm)
    assert place.last_pass == str(last_pass_of(position.row[: position.at]))
    assert str(place).startswith(f"iteration 7: {comm}, waits for rank")


def test_a_reduction_waits_for_the_same_rank_of_the_other_replicas() -> None:
    comm = Comm("RG", 0, 2)
    position = Position()
    position.enter("iteration 7")
    rows = tuple((*row, Wait(comm)) for row in PROGRAM.rows)
    position.at = len(position.begin(replace(PROGRAM, rows=rows), 2)) - 1
    assert place_of(position, groups_of(5), 5.0, 9.0).awaits == (4,)


@pytest.mark.parametrize(
    ("comm", "awaits"),
    [
        (Comm("X", 3, 1), (2,)),  # its own column: ranks 0, 2, 4 and 6
        (Comm("C1", 3), (0, 1, 2, 3, 5, 6, 7)),
        (Comm("RG", 0, 2), (5,)),
    ],
    ids=str,
)
def test_ranks_that_share_layers_wait_for_each_other(comm: Comm, awaits: tuple[int, ...]) -> None:
    """Rank 4 is pipeline rank 2 and tensor rank 0 of a pipeline of 4 with 2 ranks each."""
    grid = Grid(tensor_size=2, pipeline_size=4)
    groups = connect_grid(grid, 4, CPU, (0, 0), lambda use, tiling: None)
    position = Position()
    rows = tuple((*row, Wait(comm)) for row in PROGRAM.rows)
    position.at = len(position.begin(replace(PROGRAM, rows=rows), 2)) - 1
    assert place_of(position, groups, 5.0, 9.0).awaits == awaits


def test_passes_and_starts_wait_for_nobody() -> None:
    run = next(step for step in PROGRAM.rows[1] if isinstance(step, Run))
    start = next(step for step in PROGRAM.rows[1] if isinstance(step, Start))
    for instruction in (run, start):
        place = place_of(position_at(1, instruction), groups_of(2), 5.0, 9.0)
        assert place.awaits == ()
        assert place.instruction


def test_a_rank_that_is_not_connected_yet_has_a_place_too() -> None:
    place = place_of(Position(), None, 5.0, 9.0)
    assert str(place) == "the start; no progress for 5 s"


def test_a_rank_that_works_holds_up_those_that_wait() -> None:
    found = hang({0: RUNS, 1: WAITS, 2: WAITS}, 3)
    assert found.startswith("no rank has made progress for 400 s: rank 0 is stuck in iteration 7: ")
    assert "runs F3" in found
    assert "rank 1" not in found


def test_a_rank_between_programs_holds_up_those_that_are_ahead() -> None:
    behind = replace(BETWEEN, progress=(6, 40))
    assert "rank 2 is stuck in iteration 7;" in hang({0: WAITS, 1: WAITS, 2: behind}, 3)


def test_no_rank_is_blamed_if_all_wait_alike() -> None:
    assert "each waits for others" in hang({0: WAITS, 1: WAITS}, 2)
    assert "rank 0 is stuck" in hang({0: RUNS}, 1)


@pytest.mark.parametrize("other", [RUNS, WAITS, BETWEEN])
def test_a_job_goes_on_while_one_rank_may(other: Place) -> None:
    """It makes progress, or is in a phase that may last."""
    assert hang({0: replace(other, idle=1.0), 1: WAITS}, 2) == ""
    assert hang({0: replace(other, gives_up=3600.0), 1: WAITS}, 2) == ""


def test_a_rank_that_does_not_answer_is_lost_whatever_the_others_do() -> None:
    found = hang({1: WAITS, 2: replace(RUNS, idle=0.0)}, 3)
    assert found.startswith("rank 0 was lost: no answer")
    assert found.endswith("; rank 1 waited for it")
    assert hang({1: RUNS}, 3).startswith("ranks 0, 2 were lost")


class Gpu(DeviceProgress):
    """A GPU that says where it is."""

    def __init__(self, answer: DevicePlace | DeviceError | None) -> None:
        super().__init__(torch.device("cuda"))
        self.answer = answer

    def place(self) -> DevicePlace | None:
        if isinstance(self.answer, DeviceError):
            raise self.answer
        return self.answer


def ahead_of(answer: DevicePlace | DeviceError | None) -> Place:
    """The place of rank 2, pipeline rank 1, whose host has issued all of its program."""
    position = Position(Gpu(answer))
    position.enter("iteration 7")
    position.at = len(position.begin(PROGRAM, 1))
    return place_of(position, groups_of(2), 5.0, 9.0)


def test_the_place_of_a_gpu_that_is_behind_counts() -> None:
    row = PROGRAM.rows[1]
    waits = [(type(step), step) for step in row].index((Wait, Wait(Comm("C1", 3))))
    place = ahead_of(DevicePlace(PROGRAM, row, waits, 1))
    assert str(place).startswith("iteration 7: its GPU at C1 3, waits for ranks 0, 4, 6; its host")
    assert place.host == "the end of its program"
    assert place.progress == (1, waits)
    at, run = next(
        (at, step) for at, step in enumerate(row) if isinstance(step, Run) and at > waits
    )
    place = ahead_of(DevicePlace(PROGRAM, row, at, 1))
    assert (place.instruction, place.awaits) == (f"its GPU runs {run.name}", ())


def test_a_gpu_that_has_finished_all_leaves_the_place_to_its_host() -> None:
    place = ahead_of(None)
    assert (place.instruction, place.host) == ("", "")


def test_a_gpu_that_has_failed_is_to_blame() -> None:
    failed = replace(ahead_of(DeviceError("its GPU has failed: CUDA error")), idle=400.0)
    assert str(failed).startswith("iteration 7: its GPU has failed: CUDA error; ")
    assert "rank 1 is stuck in iteration 7: its GPU has failed" in hang({0: WAITS, 1: failed}, 2)


def in_collective(place: Place, number: int, *, axis: str = "tensor", waits: bool) -> Place:
    ranks = (0, 1) if waits else ()
    own = Entered("7", axis, number, number * waits, "all_reduce" * waits, ranks)
    return replace(place, entered=(own,))


def test_a_pass_waits_for_the_rank_that_is_missing_in_its_collective() -> None:
    places = {0: in_collective(RUNS, 8, waits=True), 1: in_collective(RUNS, 7, waits=False)}
    assert "s: rank 1 is stuck in iteration 7: runs F3" in hang(places, 2)
    lines = list(table(places, 2))
    assert lines[0].startswith("[rank 0] iteration 7: runs F3, waits for rank 1;")
    assert lines[2:] == [
        "collective 8 of the tensor axis (ranks 0-1): rank 0 in all_reduce; rank 1 has not entered "
        "it"
    ]


def test_between_programs_the_missing_rank_is_to_blame() -> None:
    places = {
        0: in_collective(BETWEEN, 8, axis="world", waits=True),
        1: in_collective(BETWEEN, 7, axis="world", waits=False),
    }
    assert "s: rank 1 is stuck in iteration 7;" in hang(places, 2)


def test_the_table_has_a_line_for_every_rank() -> None:
    assert [line.split("]")[0] for line in table({1: WAITS}, 3)] == [
        "[rank 0",
        "[rank 1",
        "[rank 2",
    ]
    assert next(table({1: WAITS}, 2)) == "[rank 0] no answer"
