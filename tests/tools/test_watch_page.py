"""The page of runs in headless Chromium: what it shows, and that it follows a run."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from harness.browser import CHROMIUM, Browser, Page
from harness.serving import serving

from megatron.commands.watch_run import main
from megatron.commands.watching.server import make_server
from megatron.commands.watching.sources import records_files
from megatron.commands.watching.watched import Watched
from tools.watch_records import evaluation, generation, interval, lines, start, write

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser: apt-get install chromium"
)

HOSTILE = "</script><img src=x onerror='window.hacked = 1'>"
DONE = "document.body.dataset.state === 'done'"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


def text(page: Page, selector: str) -> str:
    return str(page.value(f"document.querySelector({selector!r}).innerText"))


def shown_rows(page: Page, selector: str) -> list[list[str]]:
    """The cells of a table, by rows."""
    rows: list[list[str]] = page.value(
        f"[...document.querySelectorAll('{selector} tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return rows


def newest(page: Page) -> dict[str, list[str]]:
    """The table of the newest values by the names of its rows."""
    return {name: cells for name, *cells in shown_rows(page, "#newest")}


def test_a_page_in_one_file_shows_its_runs(browser: Browser, tmp_path: Path) -> None:
    """On a narrow and a wide screen, with text that would be an element if it were not escaped."""
    first = write(
        tmp_path / "one.jsonl", start(planned_idle=0.125), interval(5), evaluation(5),
        interval(10), start(5, planned_idle=0.125), interval(10, lm_loss=2.0), generation(10),
    )  # fmt: skip
    layers = [{"layer": 0, "expert_loads": [1, 3]}]
    other = [interval(5, HOSTILE, layers=layers), interval(20, HOSTILE)]
    other.append(generation(20, HOSTILE, texts=[{"prompt": "p", "text": HOSTILE}]))
    second = write(tmp_path / "two.jsonl", start(run=HOSTILE), *other, start(0, "c"))
    output = tmp_path / "page.html"
    main([str(first), str(second), "-o", str(output)])
    for width in (1400, 420):
        page = browser.open(output.as_uri(), width=width, dark=width == 420)
        page.wait(DONE)
        assert page.value(
            "document.documentElement.scrollWidth === document.documentElement.clientWidth"
        )
        shown = newest(page)
        assert shown[""] == ["one.jsonl", f"two.jsonl, {HOSTILE}", "two.jsonl, c"]
        assert shown["loss, nats per token"] == ["2", "8", ""]
        assert shown["validation loss"] == ["10.5 (iteration 5)", "", ""]
        assert shown["idle, mean of the ranks"] == ["37.5 %", "37.5 %", ""]
        assert shown["restarts"] == ["1", "0", "0"]
        assert text(page, "#restarts td:nth-child(2)") == "5"
        assert shown_rows(page, "#slowest-table")[:2] == [
            ["run", "rank", "place", "slowest in", "times the usual, median", "most in passes"],
            ["one.jsonl", "0", "pp 0, tp 0, cp 0, dp 0", "100.0 %", "1.25", "B"],
        ]
        assert "12.5 %; measured 37.5 %" in text(page, "#promised-table")
        assert page.value("document.querySelectorAll('[data-chart=loss] .restart').length") == 1
        assert page.value("document.querySelectorAll('#experts canvas').length") == 1
        shown = page.value(
            "[...document.querySelectorAll('#texts .passage')].map((cell) => cell.textContent)"
        )
        behind = "(behind the end of a document)"
        assert shown == ["p", HOSTILE, "Once upon", " a time 10", behind, "3 mice\n"]
        assert page.value("window.hacked === undefined && !document.querySelector('main img')")
        assert page.faults == []


def test_keys_and_choices_change_what_is_shown(browser: Browser, tmp_path: Path) -> None:
    first = write(tmp_path / "one.jsonl", start(), *(interval(at) for at in range(1, 41)))
    second = write(tmp_path / "two.jsonl", start(), *(interval(at) for at in range(1, 21)))
    output = tmp_path / "page.html"
    main([str(first), str(second), "-o", str(output)])
    page = browser.open(output.as_uri())
    page.wait(DONE)
    page.value("document.querySelector('[data-chart=loss] .plot').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    told = text(page, "[data-chart=loss] .tip").split("\n")
    assert told == ["iteration 2", "one.jsonl, training: 9.8", "two.jsonl, training: 9.8"]
    page.press("End")
    assert text(page, "[data-chart=loss] .tip").startswith("iteration 40\none.jsonl, training: 6\n")
    page.press("+")
    assert text(page, "#range") == "iteration 21 to iteration 40"
    page.value("document.querySelector('#zoom-fit').click()")
    assert text(page, "#range") == ""
    page.value("document.querySelectorAll('#runs input')[0].click()")
    assert newest(page)[""] == ["two.jsonl"]
    page.value("document.querySelector('input[value=tokens]').click()")
    page.wait("location.hash === '#axis=tokens'")
    page.value("document.querySelector('[data-chart=loss] .plot').focus()")
    page.press("Home")
    assert text(page, "[data-chart=loss] .tip").startswith("1,024 tokens\n")
    assert page.faults == []


def test_a_live_page_follows_the_run(browser: Browser, tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", start(), interval(5))
    watched = Watched(records_files([path], may_come=True))
    with closing(watched), serving(make_server(0, watched)) as address:
        watched.follow()
        page = browser.open(address)
        page.wait("document.body.dataset.records === '2'")
        with path.open("ab") as file:
            file.write(lines([interval(10, lm_loss=1.25)]))
        page.wait("document.body.dataset.records === '3'")
        assert newest(page)["loss, nats per token"] == ["1.25"]
        assert newest(page)["iteration"] == ["10 of 100"]
        assert page.faults == []
        browser.close_pages()
