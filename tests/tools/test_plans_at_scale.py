"""The table of plans at scale: what is measured is added to the file once, and compared."""

from pathlib import Path

import pytest

from megatron.schedules.make_plan import plan_for
from megatron.simulator.scenario import Scenario, run
from tools.plans_at_scale import COSTS, Case, Measured, add, bubble, compare, load, main, measure


def test_measurements_are_added_and_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plans.csv"
    command = ["measure", "--csv", str(file), "--per-rank", "2", "--schedules", "1f1b", "auto"]
    main([*command, "--ranks", "2"])
    main([*command, "--ranks", "2", "3", "--vocab", "none"])
    found = load(file)
    assert [(c.schedule, c.vocabulary, c.ranks, c.microbatches) for c in found] == [
        ("1f1b", "none", 2, 4), ("auto", "none", 2, 4),
        ("1f1b", "vocab-2", 2, 4), ("auto", "vocab-2", 2, 4),
        ("1f1b", "none", 3, 6), ("auto", "none", 3, 6),
    ]  # fmt: skip
    assert len(capsys.readouterr().out.splitlines()) == len(found)
    main(["compare", str(tmp_path / "none.csv"), str(file)])
    assert "| 1f1b | ?" in capsys.readouterr().out


@pytest.mark.parametrize("costs", COSTS)
def test_the_bubble_is_the_simulator_s_where_messages_are_free(costs: str) -> None:
    case = Case(costs, "zb-v", "none", 3, 6)
    simulated = run(Scenario(case.request)).timeline.bubble_rate()
    assert measure(case).bubble == pytest.approx(simulated)
    assert bubble(plan_for(case.request), COSTS[costs]) == pytest.approx(simulated)


def test_the_table_puts_before_beside_after() -> None:
    cases = [Case("even", "zb-v", "none", p, 4 * p) for p in (8, 16)]
    before = dict.fromkeys(cases, Measured(0.098, 30.0))
    after = {cases[0]: Measured(0.0, 7.5)}
    lines = list(compare(before, after))
    assert "| schedule | p = 8 | p = 16 |" in lines
    assert lines[-1] == "| zb-v | 9.8% → 0.0%, 30.0 → 7.5 s | 9.8% → ?, 30.0 → ? s |"


def test_chunks_have_a_row_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "plans.csv"
    command = ["measure", "--csv", str(file), "--ranks", "2", "--vocab", "none", "--schedules"]
    main([*command, "1f1b", "gis"])
    main([*command, "1f1b", "gis", "--chunks", "3"])
    found = load(file)
    assert [(case.schedule, case.chunks) for case in found] == [
        ("1f1b", None), ("gis", None), ("gis", 3)
    ]  # fmt: skip
    names = [line.split(" | ")[0] for line in compare(found, found) if line.startswith("| ")]
    assert names == ["| schedule", "| 1f1b", "| gis", "| gis, 3 chunks"]


def test_seconds_are_compared_at_one_pace() -> None:
    """A unit that took twice as long halves the seconds; without a unit they stay."""
    quiet, busy, old = (Case("even", "zb-v", "none", p, p) for p in (1, 2, 3))
    found = {
        quiet: Measured(0.0, 8.0, 0.5),
        busy: Measured(0.0, 8.0, 1.0),
        old: Measured(0.0, 8.0),
    }
    assert [*compare({}, found)][-1].count("? → 8.0 s") == 2
    assert "? → 0.0%, ? → 4.0 s" in [*compare({}, found)][-1]


def test_units_are_kept_in_the_file(tmp_path: Path) -> None:
    file, case = tmp_path / "plans.csv", Case("even", "zb-v", "none", 2, 2)
    add(file, case, Measured(0.25, 1.5, 0.125))
    assert load(file) == {case: Measured(0.25, 1.5, 0.125)}
    file.write_text(
        "costs,schedule,vocabulary,ranks,microbatches,bubble,seconds\neven,zb-v,none,2,2,0.25,1.5\n"
    )
    assert load(file) == {case: Measured(0.25, 1.5)}
    add(file, case._replace(ranks=3), Measured(0.5, 2.5, 0.125))
    assert load(file)[case._replace(ranks=3)] == Measured(0.5, 2.5)
    with pytest.raises(ValueError, match="no column for chunks"):
        add(file, case._replace(chunks=3), Measured(0.5, 2.5))


def test_a_file_without_measurements_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv holds no measurements"):
        load(other)
