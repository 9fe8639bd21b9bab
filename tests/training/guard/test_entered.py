"""Who is missing in a collective follows from the numbers that the ranks have entered."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.job_guard import guarded

from megatron.parallel.groups import single_rank
from megatron.runtime.position import Position
from megatron.training.guard.entered import Entered, entered_by, missed_by, stalled
from megatron.training.guard.places import place_of

ROOT = Path(__file__).resolve().parents[3]
RANKS = (4, 5, 6)


def entered(number: int, unfinished: int = 0, operation: str = "", axis: str = "tensor") -> Entered:
    return Entered("7", axis, number, unfinished, operation, RANKS if unfinished else ())


LATE = {
    4: [entered(9, 8, "all_gather")],  # a GPU's host goes on
    5: [entered(8, 8, "all_gather")],
    6: [entered(7)],
}


def test_ranks_that_have_not_entered_are_named() -> None:
    assert list(stalled(LATE)) == [
        "collective 8 of the tensor axis (ranks 4-6): ranks 4-5 in all_gather; rank 6 has not "
        "entered it"
    ]
    assert missed_by(4, LATE, in_pass=True) == missed_by(5, LATE, in_pass=False) == (6,)
    assert missed_by(6, LATE, in_pass=True) == ()


def test_a_rank_that_has_entered_nothing_is_missing() -> None:
    none = {**LATE, 6: [entered(0)]}
    assert missed_by(5, none, in_pass=True) == (6,)
    [line] = stalled(none)
    assert line.endswith("rank 6 has not entered it")


def test_of_a_group_that_the_recorder_has_dropped_nothing_is_said() -> None:
    dropped = {**LATE, 6: []}
    assert missed_by(5, dropped, in_pass=True) == ()
    [line] = stalled(dropped)
    assert line.endswith("ranks 4-5 in all_gather; rank 6: not known")


def test_of_a_rank_that_has_not_answered_nothing_is_said() -> None:
    known = {rank: LATE[rank] for rank in (4, 5)}
    assert missed_by(4, known, in_pass=True) == ()
    [line] = stalled(known)
    assert line.endswith("ranks 4-5 in all_gather; rank 6: not known")
    assert next(stalled({**LATE, 6: [entered(8, 8, "all_gather")]})).endswith("all have entered it")


def test_different_collectives_of_one_number_do_not_match() -> None:
    known = {
        4: [entered(8, 8, "all_gather")],
        5: [entered(8, 8, "all_reduce")],
        6: [entered(8, 8, "all_gather")],
    }
    assert list(stalled(known)) == [
        "collective 8 of the tensor axis (ranks 4-6): ranks 4, 6 in all_gather and rank 5 in "
        "all_reduce: these do not match"
    ]


def test_a_collective_beside_a_pass_holds_up_no_pass() -> None:
    """The vocabulary's collectives run in a lane."""
    known = {
        4: [entered(8, 8, "broadcast", "column")],
        5: [entered(7, axis="column")],
    }
    assert missed_by(4, known, in_pass=True) == ()
    assert missed_by(4, known, in_pass=False) == (5,)


def test_where_nobody_waits_nothing_is_said() -> None:
    known = {rank: [entered(8)] for rank in RANKS}
    assert list(stalled(known)) == []
    assert missed_by(4, known, in_pass=False) == ()


TWO_RANKS = """
import json, os, sys, threading, time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.parallel.grid import Grid
from megatron.parallel.groups import make_groups
from megatron.training.guard.entered import entered_by

rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
groups = make_groups(Grid(tensor_size=2), torch.device("cpu"), timedelta(seconds=60))

def tell():
    print(json.dumps([own.values() for own in entered_by(groups)]), flush=True)

def wait_for_it():
    while not any(own.axis == "tensor" and own.unfinished == 3 for own in entered_by(groups)):
        time.sleep(0.01)
    tell()
    store.set("seen", "")  # only then does rank 1 let the collective end

value = torch.ones(2)
groups.world.all_gather_object(rank)
for _ in range(2):
    groups.tensor.all_reduce(value)
if rank == 0:
    threading.Thread(target=wait_for_it).start()
else:
    store.get("seen")
    tell()
groups.tensor.all_reduce(value)
store.set(f"end of {rank}", "")
store.wait(["end of 0", "end of 1"])
os._exit(0)  # process groups may abort at the interpreter's end
"""
"""Rank 1 enters the third collective of the tensor axis when rank 0 is seen to wait there."""


def test_pytorchs_recorder_tells_it(tmp_path: Path) -> None:
    """In processes of their own: the recorder keeps collectives of groups that are gone."""
    command = [sys.executable, "-c", TWO_RANKS]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    with guarded(ranks[0]), guarded(ranks[1]):
        told = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    found = {rank: [Entered.of(own) for own in json.loads(text)] for rank, text in enumerate(told)}
    [waits], [late] = ([own for own in groups if own.axis == "tensor"] for groups in found.values())
    assert (waits.number, waits.unfinished, waits.operation) == (3, 3, "all_reduce")
    assert (late.number, late.unfinished) == (2, 0)
    assert missed_by(0, found, in_pass=True) == (1,)
    assert "collective 3 of the tensor axis (ranks 0-1): rank 0 in all_reduce; rank 1 has not" in (
        "\n".join(stalled(found))
    )


@pytest.mark.parametrize("ranks", [(), (5,), (4, 6, 8), (4, 5, 8), (3, 1), tuple(range(4096))])
def test_json_keeps_it_in_few_words(ranks: tuple[int, ...]) -> None:
    own = Entered("7", "world", 9, 8, "all_gather", ranks)
    text = json.dumps(own.values())
    assert Entered.of(json.loads(text)) == own
    assert len(text) < 150


def test_a_recorder_that_cannot_be_read_leaves_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_form(*_: object) -> bytes:
        return b'{"entries": [{}]}'

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", other_form)
    groups = single_rank(torch.device("cpu"))
    with pytest.raises(KeyError):
        entered_by(groups)
    assert place_of(Position(), groups, 5.0, 9.0).entered == ()
