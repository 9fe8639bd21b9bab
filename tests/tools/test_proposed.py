"""Published layouts beside the layouts that the search proposes: the table of the docs."""

from pathlib import Path

import pytest
from harness.marks import full

from megatron.planning.known import NEAR
from tools.predictions.proposed import HEADING, compared, main, smallest
from tools.predictions.shared_runs import SHARED, read_shared
from tools.predictions.shared_tables import PREDICTED, read_predicted

REFERENCE = Path("docs/reference")
PAGE = Path("docs/predictions.md").read_text(encoding="utf-8").splitlines()
RUNS, _ = read_shared(REFERENCE / SHARED)


def rows() -> list[list[str]]:
    start = PAGE.index(HEADING) + 2
    end = next(at for at in range(start, len(PAGE)) if not PAGE[at].startswith("|"))
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in PAGE[start:end]]


def test_rows_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--rows 7 99999: published_2026\.csv has no such row"):
        main([str(REFERENCE), "--rows", "1268", "99999", "7"])


def test_the_table_has_the_smallest_job_of_every_dense_model() -> None:
    asked = list(smallest(RUNS))
    assert [int(row[0]) for row in rows()] == [run.number for run in asked]
    for run in asked:
        others = [own for own in RUNS if own.model.family == run.model.family]
        assert all(
            own.gpus >= run.gpus
            for own in others
            if (own.gpu, own.precision) == (run.gpu, run.precision)
        )


def test_published_layouts_take_the_time_of_the_other_table() -> None:
    known = {row.number: row.ours for row in read_predicted(REFERENCE / PREDICTED)}
    assert {int(row[0]): float(row[3]) for row in rows()} == {
        int(row[0]): known[int(row[0])] for row in rows()
    }


def test_no_proposal_is_slower_than_the_published_layout() -> None:
    for row in rows():
        published, proposed, whole = (float(row[at]) for at in (3, 6, 9))
        assert proposed * (1 - NEAR) <= published, "of ways as near the smallest is taken"
        assert whole * (1 - NEAR) <= published
        gain = float(row[8].removesuffix(" %"))
        assert gain == pytest.approx(100 * (1 - proposed / published), abs=0.1)


@pytest.mark.parametrize("number", [full(1256)])
def test_the_table_is_current(number: int) -> None:
    [run] = [run for run in RUNS if run.number == number]
    [row] = [row for row in rows() if row[0] == str(number)]
    assert list(compared(run).cells) == row
