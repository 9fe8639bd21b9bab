"""What the catalogue says of a schedule is what docs/schedules.md shows and what its block does."""

import re
from pathlib import Path
from typing import Final

import pytest
from schedules.cases import DRAWN

from megatron.flags.declare import option_of
from megatron.schedules.catalogue import (
    CHUNKED_SCHEDULES,
    SCHEDULES,
    TRAINABLE_SCHEDULES,
    TRAITS,
    takers,
)

ROOT: Final = Path(__file__).resolve().parents[2]


def page_rows() -> dict[str, list[str]]:
    """Return the cells of the page's table of schedules by the schedule that a row is about."""
    page = (ROOT / "docs/schedules.md").read_text()
    table = page.split("| `--pipeline-schedule` |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {name: row for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def test_the_page_shows_every_schedule() -> None:
    assert {*page_rows()} == {*TRAITS}


@pytest.mark.parametrize("schedule", DRAWN)
def test_the_page_describes_and_draws_every_block(schedule: str) -> None:
    _, description, *_, picture = page_rows()[schedule]
    assert description == SCHEDULES[schedule].description
    assert picture == f"[{schedule}](../images/{schedule}.svg)"
    assert (ROOT / "images" / f"{schedule}.svg").is_file()


@pytest.mark.parametrize("schedule", TRAITS)
def test_the_page_names_the_paper_of_every_schedule(schedule: str) -> None:
    *_, source, _ = page_rows()[schedule]
    paper = TRAITS[schedule].paper
    address = paper.replace("arXiv ", "https://arxiv.org/abs/")
    assert source == (f"[{paper}]({address})" if paper else "")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_block_has_the_chunks_and_passes_that_the_catalogue_says(schedule: str) -> None:
    known = SCHEDULES[schedule]
    for chunks in {known.chunks, known.chunks + known.chunk_step}:
        block = known.block(3, 6, chunks)
        assert block.chunks == chunks
        assert len(block.stages) == len({*block.stages}) == 3 * chunks
        assert any(slot.kind == "W" for row in block.rows for slot in row) == known.split


def test_schedules_take_the_options_that_they_can_be_made_with() -> None:
    for name, own in SCHEDULES.items():
        for option in own.block_options:
            assert name in takers(option_of(option))
    assert takers("--num-virtual-stages-per-pipeline-rank") == CHUNKED_SCHEDULES
    assert takers("--schedule-file") == ("file",)


def test_a_request_may_say_how_many_chunks_only_where_that_is_free() -> None:
    assert CHUNKED_SCHEDULES == ("interleaved", "hanayo", "gis", "gis-h", "pipeoffload")
    assert TRAITS["interleaved"].chunks_fault(5) is None
    assert TRAITS["hanayo"].chunks_fault(6) is None
    assert TRAITS["zb-v"].chunks_fault(2) is None
    fault = f"has 2 chunks a rank, not 4: {' or '.join(CHUNKED_SCHEDULES)} can have more"
    assert TRAITS["zb-v"].chunks_fault(4) == fault


def test_only_what_every_rank_finds_alike_is_trained() -> None:
    assert {*TRAITS} - {*TRAINABLE_SCHEDULES} == {"optimal"}
