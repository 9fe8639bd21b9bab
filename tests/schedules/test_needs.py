"""What moves where: by hand, on the smallest plans that show it."""

from dataclasses import replace

import pytest

from megatron.schedules.lower import Run, lower
from megatron.schedules.needs import Comm, CommKind, needs, participants, sources
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan

V_SHAPE = Plan.from_text(
    "microbatches 1\nstages 0.0 1.0 1.1 0.1\nvocabulary none\n"
    "0: F0 F0.1 B0.1 B0\n"
    "1: F0 F0.1 B0.1 B0\n"
)
VOCABULARY = Plan.from_text(
    "microbatches 1\nstages 0.0 1.0\nvocabulary vocab-1\n"
    "0: IF0 F0 S0 T0 B0 IB0\n1: IF0 F0 S0 T0 B0 IB0\n"
)


@pytest.mark.parametrize(
    ("rank", "item", "expected"),
    [
        (0, "F0", []),
        (1, "F0", ["X0 from 0"]),
        (1, "F0.1", ["F0"]),  # the turn of the V stays on its rank
        (0, "F0.1", ["X0 from 2"]),
        (0, "B0.1", ["F0.1"]),
        (1, "B0.1", ["F0.1", "G0 from 3"]),
        (1, "B0", ["F0", "B0.1"]),
        (0, "B0", ["F0", "G0 from 1"]),
        (0, "W0.1", ["B0.1"]),
    ],
)
def test_v_shape(rank: int, item: str, expected: list[str]) -> None:
    assert list(map(str, needs(V_SHAPE, rank, Pass.parse(item)))) == expected


FOLDED = Plan.from_text(
    "microbatches 1\nstages 0.0 1.0 1.1 0.1\nvocabulary vocab-2\nlooks ahead\n"
    "0: IF0 F0 F0.1 S0 B0.1 B0 T0 IB0\n1: IF0 F0 F0.1 S0 B0.1 B0 T0 IB0\n"
)


@pytest.mark.parametrize(
    ("rank", "item", "expected"),
    [
        (0, "F0", ["CIF 0"]),
        (1, "F0", ["X0 from 0", "CIF 0"]),
        (0, "IB0", ["IF0", "B0", "CIB 0"]),
        (1, "IB0", ["IF0", "B0", "CIB 0"]),
    ],
)
def test_a_last_stage_that_looks_ahead_reads_embeddings(
    rank: int, item: str, expected: list[str]
) -> None:
    ahead = replace(VOCABULARY, ahead_stage=1)
    assert list(map(str, needs(ahead, rank, Pass.parse(item)))) == expected
    assert sources(ahead, Comm("CIB", 0)) == ((0, Pass("B", 0)), (1, Pass("B", 0)))


@pytest.mark.parametrize(
    ("rank", "item", "expected"),
    [
        (1, "F0", ["X0 from 0"]),
        (1, "F0.1", ["F0", "CIF 0"]),
        (0, "F0.1", ["X0 from 2"]),
        (0, "IB0", ["IF0", "B0", "CIB 0"]),
        (1, "IB0", ["IF0", "B0.1", "CIB 0"]),
    ],
)
def test_an_earlier_stage_may_look_ahead_in_place_of_the_last(
    rank: int, item: str, expected: list[str]
) -> None:
    middle = replace(FOLDED, ahead_stage=2)
    assert list(map(str, needs(middle, rank, Pass.parse(item)))) == expected
    assert sources(middle, Comm("CIB", 0)) == ((0, Pass("B", 0)), (1, Pass("B", 0, 1)))
    assert [middle.hands_on_predictions(stage) for stage in range(4)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("rank", "item", "expected"),
    [
        (0, "F0", ["CIF 0"]),
        (0, "F0.1", ["X0 from 2", "CIF 0"]),
        (0, "IB0", ["IF0", "B0", "B0.1"]),
        (1, "IB0", ["IF0", "CIB 0"]),
    ],
)
def test_a_rank_with_both_ends_waits_for_both(rank: int, item: str, expected: list[str]) -> None:
    assert list(map(str, needs(FOLDED, rank, Pass.parse(item)))) == expected
    assert sources(FOLDED, Comm("CIB", 0)) == ((0, Pass("B", 0)), (0, Pass("B", 0, 1)))


def test_a_gradient_of_both_ends_is_sent_once_both_are_there() -> None:
    [row, _] = lower(FOLDED).rows
    steps = [str(step.item) if isinstance(step, Run) else str(step.comm) for step in row]
    assert steps.index("CIB 0") > max(steps.index("B0"), steps.index("B0.1"))


NAIVE = Plan.from_text(
    "microbatches 1\nstages 0.0 1.0\nvocabulary naive\n"
    "0: IF0 F0 S0 E0 T0 B0 IB0\n1: IF0 F0 S0 E0 T0 B0 IB0\n"
)
SYNCHRONOUS = Plan.from_text(VOCABULARY.to_text().replace("vocab-1", "interlaced"))


@pytest.mark.parametrize(
    ("rank", "item", "expected"),
    [
        (0, "IF0", []),
        (0, "F0", ["CIF 0"]),
        (1, "F0", ["X0 from 0"]),
        (0, "S0", ["C0 0"]),
        (1, "S0", ["F0"]),  # what the last stage broadcasts is its own
        (0, "T0", ["S0", "C1 0"]),
        (1, "B0", ["F0", "C2 0"]),
        (0, "IB0", ["IF0", "B0"]),
        (1, "IB0", ["IF0", "CIB 0"]),
    ],
)
def test_vocabulary(rank: int, item: str, expected: list[str]) -> None:
    assert list(map(str, needs(VOCABULARY, rank, Pass.parse(item)))) == expected


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("S0", ["F0"]),
        ("E0", ["S0", "C1 0"]),
        ("T0", ["E0", "C2 0"]),
        ("B0", ["F0", "C3 0"]),
    ],
)
def test_naive_merges_maximum_sum_and_gradient_one_after_the_other(
    item: str, expected: list[str]
) -> None:
    assert list(map(str, needs(NAIVE, 1, Pass.parse(item)))) == expected


@pytest.mark.parametrize(("barrier", "merged"), [("C1", "S0"), ("C2", "E0"), ("C3", "T0")])
def test_what_the_barriers_of_naive_merge(barrier: CommKind, merged: str) -> None:
    comm = Comm(barrier, 0)
    assert list(sources(NAIVE, comm)) == [(rank, Pass.parse(merged)) for rank in (0, 1)]
    assert participants(NAIVE, comm) == (0, 1)


@pytest.mark.parametrize(("rank", "expected"), [(0, ["C0 0"]), (1, ["F0", "C0 0"])])
def test_a_synchronous_broadcast_is_one_that_its_own_rank_waits_for(
    rank: int, expected: list[str]
) -> None:
    assert list(map(str, needs(SYNCHRONOUS, rank, Pass.parse("S0")))) == expected


@pytest.mark.parametrize(
    ("comm", "from_ranks", "pass_moved", "members"),
    [
        (Comm("X", 0, 0), [0], "F0", (0, 1)),
        (Comm("G", 0, 1), [1], "B0", (1, 0)),
        (Comm("C0", 0), [1], "F0", (0, 1)),
        (Comm("C1", 0), [0, 1], "S0", (0, 1)),
        (Comm("C2", 0), [0, 1], "T0", (0, 1)),
        (Comm("CIF", 0), [0, 1], "IF0", (0, 1)),
        (Comm("CIB", 0), [0], "B0", (0, 1)),
    ],
)
def test_what_a_communication_moves(
    comm: Comm, from_ranks: list[int], pass_moved: str, members: tuple[int, ...]
) -> None:
    expected = [(rank, Pass.parse(pass_moved)) for rank in from_ranks]
    assert list(sources(VOCABULARY, comm)) == expected
    assert participants(VOCABULARY, comm) == members
