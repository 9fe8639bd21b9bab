"""Costs as users write them: what is meant arrives, what cannot be meant is refused by name."""

import errno
import json
import os
import re
from itertools import product
from pathlib import Path

import pytest

from megatron.schedules.costs import Costs, Exchange, Time
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.cost_file import (
    CostFile,
    check_measured,
    load_costs,
    parse_costs,
    save_costs,
)
from megatron.simulator.costs.peak_bytes import Sizes


def written(folder: Path, document: object) -> Path:
    path = folder / "costs.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_words() -> None:
    costs = parse_costs("F=1,B=2:3, S=.5,p2p=0.1,C1=0.2")
    assert costs.passes == {"F": 1, "B": [2, 3], "S": 0.5, "E": 0, "T": 0, "IF": 0, "IB": 0}
    assert costs.comms == {"X": 0.1, "G": 0.1, "C1": 0.2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F", "'F' is no cost"),
        ("F=", "'F=' is no cost"),
        ("F=one", "'F=one' is no cost"),
        ("", "'' is no cost"),
        ("Q=1", "'Q' is no communication, nor a pass"),
        ("C1=1:2", "'C1=1:2': only passes"),
        ("F=-1", "F=-1 is no cost"),
        ("F=1:nan", "F=nan is no cost"),
        ("p2p=inf", "X=inf is no cost"),
        ("F=1,F=2", "F is given twice"),
        ("p2p=1,G=2", "G is given twice"),
    ],
)
def test_words_that_make_no_costs(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_costs(text)


def test_a_file(tmp_path: Path) -> None:
    document = {
        "passes": {"F": 1, "B": [2, 3], "W": [[1, 2], [3, 4]]},
        "comms": {"p2p": 0.5, "C0": 1},
        "bytes": {
            "static": [5, 6],
            "activation": [[7, 8], [9, 10]],
            "embedding": 11,
            "working": {"S": 12, "B": [[1, 2], [3, 4]]},
        },
        "layers": [[2, 1], [0, 3]],
    }
    costs, sizes, layers, named = load_costs(written(tmp_path, document))
    assert {kind: costs.passes[kind] for kind in ("F", "B", "W")} == document["passes"]
    assert costs.comms == {"X": 0.5, "G": 0.5, "C0": 1}
    assert sizes == Sizes(
        [5, 6], [[7, 8], [9, 10]], 0.0, 11, working={"S": 12, "B": [[1, 2], [3, 4]]}
    )
    assert layers == [[2, 1], [0, 3]]
    assert named == {"F", "B", "W", "X", "G", "C0"}


@pytest.mark.parametrize("slices", [0, 2])
def test_what_is_saved_is_loaded(slices: int, tmp_path: Path) -> None:
    kinds: tuple[PassKind, ...] = ("S", "E", "T", "IF", "IB")
    free = dict.fromkeys(kinds, 0.0)
    passes: dict[PassKind, Time] = {"F": [[1.0, 2.0], [3.0, 4.0]], "B": 2.5, **free}
    each = tuple(Costs(passes, {"C1": 1 + number}) for number in range(slices))
    costs = Costs(passes, {"C1": 1}, slices=each)
    save_costs(tmp_path / "costs.json", costs, [[2, 1], [0, 3]])
    named = frozenset({"F", "B", "C1", *free})
    assert load_costs(tmp_path / "costs.json") == CostFile(costs, None, [[2, 1], [0, 3]], named)


@pytest.mark.parametrize(("measured", "planned"), list(product(TREATMENTS, repeat=2)))
@pytest.mark.parametrize("ranks", [1, 3])
def test_costs_go_with_treatments_that_have_the_same_passes_and_barriers(
    measured: str, planned: str, ranks: int, tmp_path: Path
) -> None:
    """What is measured is what runs: barriers only where there is more than one rank."""
    plans = [make_plan("1f1b", treatment, ranks, 1) for treatment in (measured, planned)]
    passes = [{item.kind for row in plan.rows for item in row} for plan in plans]
    barriers = [
        {barrier.kind for barrier in plan.treatment.barriers} if ranks > 1 else set()
        for plan in plans
    ]
    comms: dict[CommKind, float] = dict.fromkeys(sorted(barriers[0]), 0.1)
    save_costs(tmp_path / "costs.json", Costs(dict.fromkeys(passes[0], 1.0), comms), [[1]] * ranks)
    file = load_costs(tmp_path / "costs.json")
    if passes[0] == passes[1] and barriers[0] == barriers[1]:
        check_measured(file, TREATMENTS[planned])
    else:
        with pytest.raises(ValueError, match=f"not measured with .* {planned}: .* measure with"):
            check_measured(file, TREATMENTS[planned])


@pytest.mark.parametrize(
    ("passes", "vocabulary", "fault"),
    [
        ("F B", "vocab-2", "IB IF S T missing; measure"),
        ("F B S T IF IB", "redis", "IB IF S T of another treatment; measure"),
        ("F B S IF IB E", "vocab-2", "T missing, E of another treatment; measure"),
    ],
)
def test_it_is_said_what_was_not_measured(
    passes: str, vocabulary: str, fault: str, tmp_path: Path
) -> None:
    path = written(tmp_path, {"passes": dict.fromkeys(passes.split(), 1)})
    with pytest.raises(ValueError, match=fault):
        check_measured(load_costs(path), TREATMENTS[vocabulary])


def test_a_file_without_bytes(tmp_path: Path) -> None:
    assert load_costs(written(tmp_path, {"passes": {"F": 1}})).sizes is None


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "costs.json: is no complete JSON: Expecting property name"),
        ('{"passes": {"F": 1, "B', "is no complete JSON: Unterminated string"),
        ("", "is no complete JSON: Expecting value in line 1"),
        ("[" * 100_000, "holds lists in lists without end: give a file that --save-measured-costs"),
        ([1], "the file is [1]"),
        ({"pass": {}}, "'pass' is no section"),
        ({"slices": {}}, "slices is {}: write a list with an object for each slice"),
        ({"slices": [1]}, "a slice is 1: write an object"),
        ({"slices": [{"passes": {"C1": 1}}]}, "'C1' is no pass"),
        ({"passes": [1]}, "passes is [1]"),
        ({"passes": {"Q": 1}}, "'Q' is no pass"),
        ({"passes": {"C1": 1}}, "'C1' is no pass"),
        ({"passes": {"F": "1"}}, 'F is "1": write a number or a list'),
        ({"passes": {"F": True}}, "F is true: write a number"),
        ({"passes": {"F": []}}, "F is []: write a number"),
        ({"passes": {"F": [[[1]]]}}, "F is [1]: write a number"),
        ({"passes": {"F": -2}}, "F=-2 is no cost"),
        ('{"passes": {"F": NaN}}', "F=nan is no cost"),
        ('{"passes": {"F": 1, "F": 2}}', "'F' is given twice"),
        ({"comms": {"C1": [1, 2]}}, "C1 is [1, 2]: write a number"),
        ({"comms": {"p2p": [[1], [2]]}}, "p2p is [1]: write a number"),
        ({"comms": {"F": 1}}, "'F' is no communication"),
        ({"layers": [1, 2]}, "layers is [1, 2]: write a list for each rank"),
        ({"layers": [[1], [-1]]}, "layers is [[1], [-1]]: write"),
        ({"bytes": {"weights": 1}}, "bytes has no 'weights': write static"),
        ({"bytes": {"static": [[1]]}}, "static is [1]: write a number"),
        ({"bytes": {"activation": -1}}, "activation=-1 is no size"),
        ({"bytes": {"working": {"X": 1}}}, "working has no pass 'X'"),
        ({"bytes": {"working": {"S": -1}}}, "S=-1 is no size"),
    ],
)
def test_other_files_are_refused_by_name(document: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_costs(written(tmp_path, document))
    assert str(tmp_path / "costs.json") in str(caught.value)


@pytest.mark.parametrize("content", [bytes(range(256)), b"\0\0", b"\xff\xfe{}"], ids=repr)
def test_a_binary_file_is_no_text(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"costs\.json: is no text: "):
        load_costs(tmp_path / "costs.json")


def test_what_cannot_be_written_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new folder" / "costs.json"
    save_costs(path, Costs({"F": 1.0, "B": 2.0}), [[1]])
    before = path.read_text()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        save_costs(path, Costs({"F": 5.0, "B": 5.0}), [[1]])
    assert path.read_text() == before
    assert os.listdir(path.parent) == ["costs.json"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*no\.json: No such file"):
        load_costs(tmp_path / "no.json")
    with pytest.raises(ValueError, match=rf"{tmp_path}.* is a folder, not a file"):
        load_costs(tmp_path)


def test_exchanges_with_replicas_are_by_rank_and_come_back_from_a_file(tmp_path: Path) -> None:
    costs = parse_costs("F=1,B=2,U=0.5:0.25,RG=3:4,AG=2")
    assert costs.passes["U"] == [0.5, 0.25]
    assert costs.exchanges == {"RG": Exchange([3, 4])}
    assert costs.comms == {"AG": 2}
    only = Costs({kind: costs.passes[kind] for kind in ("F", "B", "U")}, {}, costs.exchanges)
    save_costs(tmp_path / "costs.json", only, [[1], [1]])
    file = load_costs(tmp_path / "costs.json")
    assert file.costs.passes["U"] == [0.5, 0.25]
    assert file.costs.exchanges == costs.exchanges
    check_measured(file, TREATMENTS["none"])  # replicas go with any treatment
