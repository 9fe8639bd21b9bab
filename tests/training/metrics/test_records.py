"""Every value that is recorded is defined on the page of figures."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megatron.training.metrics.json_lines import EVENTS
from megatron.training.metrics.records import RankFigures, Slowest

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text("utf-8")


@pytest.mark.parametrize("kind", [*EVENTS, RankFigures, Slowest], ids=lambda kind: kind.__name__)
def test_the_page_of_figures_defines_every_value(kind: type) -> None:
    for field in fields(kind):
        row = rf"^\| (`\w+`, )*`{field.name}`(, `\w+`)* \| \S"
        assert re.search(row, PAGE, re.MULTILINE), field.name


@pytest.mark.parametrize("event", EVENTS.values())
def test_the_page_of_figures_names_every_event(event: str) -> None:
    assert f"`{event}`" in PAGE
