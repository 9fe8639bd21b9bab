"""Ways of ``tools/plan.py`` on the explorer's page: points, flags, timelines, and nothing else.

The cases in Chromium need the browser; the quickest one runs always, where there is one.
"""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from harness.browser import CHROMIUM, Browser, Page
from harness.serving import serving
from simulator.test_ways_folder import JOB, TIMELINES, way

from megatron.commands.explore_schedules import main
from megatron.commands.exploring.interface import answer
from megatron.commands.exploring.server import make_server
from megatron.commands.exploring.shown import drawing
from megatron.commands.exploring.simulated import Simulations
from megatron.simulator.ways_folder import WaysFolder, save_ways

GIB: Final = 1 << 30
WAYS: Final = [
    (
        way(
            role="obstacle",
            fits=False,
            seconds=1.5,
            bytes=75 * GIB,
            bytes_left=-5 * GIB,
            words=["--micro-batch-size", "4"],
        ),
        TIMELINES[0],
    ),
    (way(role="taken", planned=True, seconds=2.0, microbatches=64), TIMELINES[1]),
    (way(seconds=2.25, bytes=50 * GIB, bytes_left=20 * GIB), None),
    (way(role="unsplit", seconds=2.5, vocabulary="none"), TIMELINES[0]),
    (way(seconds=2.75, fits=False), TIMELINES[1]),
]
"""Ways of which the third has no timeline, and the last does not fit the memory of its hosts."""

browsing = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the ways; beside it lies a file that nobody may read."""
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    save_ways(tmp_path / "ways", JOB, WAYS)
    return tmp_path / "ways"


@pytest.fixture
def served(folder: Path) -> Iterator[str]:
    """Address of the page with the ways."""
    with serving(make_server(0, WaysFolder.read(folder))) as address:
        yield address


def ask(folder: Path | None, **request: object) -> dict[str, Any]:
    ways = None if folder is None else WaysFolder.read(folder)
    found: dict[str, Any] = json.loads(answer(json.dumps(request), Simulations(), ways=ways))
    return found


def test_a_way_is_answered_as_it_was_written(folder: Path) -> None:
    listed = ask(folder, action="facts")["ways"]
    assert [own["seconds"] for own in listed["ways"]] == [own["seconds"] for own, _ in WAYS]
    found = ask(folder, action="way", number=2)
    expected = drawing(TIMELINES[1])
    assert found["drawing"]["end"] == expected["end"]
    ranks: Any = expected["ranks"]
    for row, other in zip(found["drawing"]["ranks"], ranks, strict=True):
        assert row["passes"] == [list(span) for span in other["passes"]]
    assert found["total"] == pytest.approx(TIMELINES[1].end)


def test_without_ways_there_are_none() -> None:
    assert ask(None, action="facts")["ways"] is None
    assert (
        "start explore-schedules with --candidates (" in ask(None, action="way", number=1)["error"]
    )


@pytest.mark.parametrize(
    "number", [0, 6, -1, 1.5, "1", "../secret", "/etc/passwd", None, [], {}, 10**400]
)
def test_a_number_that_is_no_way_is_refused(folder: Path, number: object) -> None:
    told = ask(folder, action="way", number=number)
    assert "there is no way" in told["error"]
    assert len(told["error"]) < 100


def test_nothing_of_the_folder_is_served_by_its_name(served: str, folder: Path) -> None:
    asked = urlsplit(served)
    connection = HTTPConnection(asked.hostname or "", asked.port, timeout=30)
    inside = [own.name for own in folder.iterdir()]
    assert "candidates.json" in inside
    for name in (*inside, "ways/way-1.json", "../secret.json", "secret.json", "%2e%2e/secret.json"):
        connection.request("GET", f"/{name}")
        response = connection.getresponse()
        assert (response.status, b"secret" in response.read()) == (404, False), name
    connection.close()


def test_a_folder_that_holds_no_ways_is_refused(tmp_path: Path, folder: Path) -> None:
    for bad, fault in (
        (tmp_path, "No such file or directory"),
        (tmp_path / "secret.json", "Not a directory"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["--candidates", str(bad), "--port", "0"])
        told = f"--candidates {bad}: {bad / 'candidates.json'}: {fault}: give a folder that"
        assert told in str(ended.value)
    (folder / "way-4.json").unlink()
    with pytest.raises(
        SystemExit, match=r"names the timeline way-4.json, which is not there: give"
    ):
        main(["--candidates", str(folder), "--port", "0"])


def test_an_exported_page_shows_no_ways(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--candidates", str(folder), "--export", str(tmp_path / "site")])
    assert "--candidates" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as running:
        yield running


def text(page: Page, selector: str) -> str:
    return str(page.value(f"document.querySelector({selector!r}).textContent"))


def opened(browser: Browser, address: str, **how: Any) -> Page:
    page = browser.open(address + "#p=2&m=2", **how)
    page.wait("document.body.dataset.way && document.body.dataset.state === 'done'")
    return page


def take(page: Page, index: int) -> None:
    """Take a point by its keys."""
    page.value("delete document.body.dataset.way")
    page.value(f"document.querySelector('#ways [data-index=\"{index}\"]').focus()")
    page.press("Enter")
    page.wait(f"document.body.dataset.way === '{index + 1}'")


PLACES: Final = """[...document.querySelectorAll("#ways .point")].map((point) => {
    const circle = point.querySelector("circle");
    return [...["cx", "cy"].map((name) => Number(circle.getAttribute(name))),
        getComputedStyle(circle).fill === getComputedStyle(circle).stroke];
})"""
LINE: Final = 'document.querySelector("#ways .limit").getAttribute("d").match(/ ([0-9.]+)H/)[1]'


@browsing
def test_points_lie_where_their_ways_are_and_open_them(
    browser: Browser, served: str, folder: Path
) -> None:
    page = opened(browser, served)
    assert text(page, "#ways-title") == "Ways for model on 8 H100"
    found = page.value(PLACES)
    figures = [own for own, _ in WAYS]
    assert [filled for _, _, filled in found] == [False, False, True, True, False]
    page.value("document.activeElement.blur()")
    # Along both axes places follow from the values by one scale; less memory is further down.
    per_second = (found[4][0] - found[0][0]) / (figures[4]["seconds"] - figures[0]["seconds"])
    per_byte = (found[2][1] - found[0][1]) / (figures[2]["bytes"] - figures[0]["bytes"])
    assert per_second > 0 > per_byte
    for (x, y, _), own in zip(found, figures, strict=True):
        along = found[0][0] + per_second * (own["seconds"] - figures[0]["seconds"])
        assert x == pytest.approx(along, abs=0.01)
        down = found[0][1] + per_byte * (own["bytes"] - figures[0]["bytes"])
        assert y == pytest.approx(down, abs=0.01)
    room = found[0][1] + per_byte * (70 * GIB - figures[0]["bytes"])
    assert float(page.value(LINE)) == pytest.approx(room, abs=0.01)
    # The taken way is open at once: its flags, and that its timeline is of few microbatches.
    assert text(page, "#way-details").startswith("Way 2 (taken): t 4, p 2, 1f1b, vocab-2: 2 s an")
    assert text(page, "#way-words") == "--pipeline-model-parallel-size 2"
    hint = "Timeline of a plan of 3 microbatches, by which the time of 64 was estimated"
    assert text(page, "#way-hint").startswith(hint)
    assert not page.value("document.querySelector('#way-plan').hidden")
    drawn = "document.querySelector('#way-plan').toDataURL()"
    before = page.value(drawn)
    take(page, 0)
    assert "lacks 5 GiB" in text(page, "#way-details")
    assert text(page, "#way-words") == "--micro-batch-size 4"
    assert text(page, "#way-hint").startswith("Timeline of all 3 microbatches")
    assert page.value(drawn) != before
    page.value("document.querySelector('#ways [data-index=\"3\"]').focus()")  # without opening it
    assert text(page, "#way-details").startswith("Way 4 (best without a split vocabulary)")
    page.value("document.activeElement.blur()")
    assert text(page, "#way-details").startswith("Way 1 ")
    take(page, 4)
    assert "does not fit the memory of its hosts" in text(page, "#way-details")
    # Ways that cannot be opened say why, and the next one opens again.
    take(page, 2)
    assert "way 3 has no timeline" in text(page, "#way-fault")
    assert page.value("document.querySelector('#way-plan').hidden")
    (folder / "way-4.json").write_text("{}")
    take(page, 3)
    assert f"{folder / 'way-4.json'} holds no timeline" in text(page, "#way-fault")
    take(page, 1)
    assert page.value("document.querySelector('#way-fault').hidden")
    assert page.value(drawn) == before
    assert page.faults == []


@pytest.mark.full
@browsing
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_ways_are_as_wide_as_a_narrow_screen(browser: Browser, served: str, dark: bool) -> None:
    page = opened(browser, served, width=400, dark=dark)
    page.value("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert page.value("document.documentElement.scrollWidth") == 400
    assert page.value("document.querySelectorAll('#ways-table tbody tr').length") == len(WAYS)
    assert page.value("document.querySelectorAll('#ways .point text').length") >= 1
    assert page.faults == []
