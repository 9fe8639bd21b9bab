"""The table of pairs: what it says of a job, without and with pairs."""

from tools import pairs_page
from tools.pages.tables import percent
from tools.predictions.scenarios import Scenario

JOB = Scenario("8B", pipeline=2, tensor=4, schedule="dualpipe-v", treatment="none", samples=6)


def test_the_row_of_a_job_has_both_predictions() -> None:
    alone, paired = (
        pairs_page.Figures.of(own.forecast) for own in (JOB, JOB._replace(more=pairs_page.PAIRS))
    )
    assert paired.seconds < alone.seconds
    assert paired.tensor < alone.tensor
    cells = [cell.strip() for cell in pairs_page.job_row(JOB).strip("|").split("|")]
    assert cells[:5] == ["8 H100", "8B", "4, 2, 1", "none", "`dualpipe-v`"]
    assert cells[5:9] == [
        f"{alone.seconds:.2f}",
        f"{paired.seconds:.2f}",
        percent(alone.tensor),
        percent(paired.tensor),
    ]
    assert len(cells) == len(pairs_page.COLUMNS)
