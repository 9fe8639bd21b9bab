"""The page in headless Chromium: its numbers, its links, its width, its keys, its speed.

These cases need a browser: the quickest one runs always, where there is one, the others with the
full run. The last ones run Python in the browser too, where ``$PYODIDE`` names a folder with the
unpacked npm package or npm can fetch it.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pytest
from harness.browser import CHROMIUM, Browser, Page
from harness.serving import serving

from megatron.commands.exploring.case import Case
from megatron.commands.exploring.export import export
from megatron.commands.exploring.interface import answer
from megatron.commands.exploring.server import make_server
from megatron.commands.exploring.simulated import Simulations
from megatron.simulator.simulate import Timeline
from megatron.simulator.timeline_file import save_timeline
from tools.explorer_cases import CASES

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser: apt-get install chromium"
)

FIGURES: Final = ("iteration_time", "idle", "bubble_rate", "peak_in_flight")
STRUCK: Final = r"""() => {
    const all = (what) => [...document.querySelectorAll(`#scatter ${what}`)];
    const box = (node) => {
        const { x, y, width, height } = node.getBBox();
        return [x, y, x + width, y + height];
    };
    const path = all(".front")[0].getAttribute("d");
    const corners = [...path.matchAll(/([\d.]+) ([\d.]+)/g)].map(([, x, y]) => [+x, +y]);
    const lines = corners.slice(1).map(([x, y], at) => {
        const [px, py] = corners[at];
        return [Math.min(x, px), Math.min(y, py), Math.max(x, px), Math.max(y, py)];
    });
    const labels = all(".point text"), marks = [...lines, ...all("circle").map(box)];
    const crosses = ([l, t, r, b], [x, y, w, h]) => w > l && x < r && h > t + 3 && y < b - 3;
    return labels.filter((label) => {
        const others = labels.filter((own) => own !== label).map(box);
        return [...marks, ...others].some((other) => crosses(box(label), other));
    }).map((label) => label.textContent);
}"""
"""Labels of the plot that another mark crosses. Boxes of text have room for accents."""
DONE: Final = "document.body.dataset.state === 'done'"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """A browser whose tabs are closed after the test, so that none goes on comparing."""
    yield chromium
    chromium.close_pages()


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """Address of the page with Python behind it."""
    with serving(make_server(0)) as address:
        yield address


class _Quiet(SimpleHTTPRequestHandler):
    """A plain file host that writes no log."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the exported page on a plain file host."""
    folder = tmp_path_factory.mktemp("site")
    given = os.environ.get("PYODIDE")
    if not given and shutil.which("npm") is None:
        pytest.skip("needs npm, or $PYODIDE with the unpacked npm package pyodide")
    export(folder, Path(given) if given else None)
    handler = partial(_Quiet, directory=str(folder))
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as address:
        yield address


def fragment(case: Mapping[str, Any]) -> str:
    """Return the part of the address that shows a case; what is absent in it is as usual."""
    usual = {"vocab": "vocab-2", "costs": "F=1,B=1,W=1", "output": "", **case}
    words: dict[str, Any] = {}
    for name, value in usual.items():
        if isinstance(value, Mapping):
            words |= {f"{name}.{own}": each for own, each in value.items()}
        else:
            words[name] = value
    texts = {name: str(v).lower() if isinstance(v, bool) else v for name, v in words.items()}
    return "#" + urlencode(texts)


def shown(page: Page) -> dict[str, Any]:
    """Return the figures that the page shows, as exact as they came."""
    texts = page.value(
        "Object.fromEntries([...document.querySelectorAll('#figures dd')]"
        ".map((e) => [e.dataset.name, e.dataset.value]))"
    )
    return {name: json.loads(text) for name, text in texts.items()}


def text(page: Page, selector: str) -> str:
    return str(page.value(f"document.querySelector({selector!r}).textContent"))


def open_case(browser: Browser, address: str, case: Mapping[str, Any], **how: Any) -> Page:
    page = browser.open(address + fragment(case), **how)
    page.wait(DONE)
    assert page.value("document.querySelector('#error').hidden"), text(page, "#error")
    return page


def expected(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``tools/simulate.py --json`` prints of a case: ``test_explorer_interface``."""
    request = json.dumps({"action": "simulate", "case": case})
    found: dict[str, Any] = json.loads(answer(request, Simulations()))["figures"]
    return found


def assert_figures(page: Page, case: Mapping[str, Any]) -> None:
    figures, found = expected(case), shown(page)
    for name in (*FIGURES, *(["peak_bytes"] if "model" in case else [])):
        # Sums of the browser's CPython, which is newer, have other last digits.
        assert found[name] == pytest.approx(figures[name], rel=1e-12), name
    percent = f"{100 * figures['idle']:.1f} %"
    assert text(page, "#figures dd[data-name=idle]") == percent
    assert page.faults == []


def test_the_page_shows_the_figures_of_the_command(browser: Browser, served: str) -> None:
    assert_figures(open_case(browser, served, CASES["usual"]), CASES["usual"])


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_served_figures_are_those_of_the_command(browser: Browser, served: str, name: str) -> None:
    assert_figures(open_case(browser, served, CASES[name]), CASES[name])


@pytest.mark.full
def test_python_in_the_browser_finds_the_same_figures(browser: Browser, exported: str) -> None:
    page = browser.open(exported)
    page.wait(DONE)
    for name, case in CASES.items():
        page.value("document.body.dataset.state = 'left'")
        page.value(f"location.hash = {fragment(case)!r}")
        page.wait(DONE)
        assert text(page, "#error") == "", name
        assert_figures(page, case)


@pytest.mark.full
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_narrow_page_is_as_wide_as_the_screen(browser: Browser, served: str, dark: bool) -> None:
    cases = [{**CASES["usual"], "m": 24}, CASES["of a model"], {**CASES["two barriers"], "p": 16}]
    for case in cases:
        page = open_case(browser, served, case, width=400, dark=dark)
        page.wait("document.querySelectorAll('#compare-table td').length")
        page.value("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        assert page.value("document.documentElement.scrollWidth") == 400


@pytest.mark.full
def test_a_link_reproduces_what_is_seen(browser: Browser, served: str) -> None:
    page = open_case(browser, served, CASES["two barriers"])
    page.value("document.querySelector('#plan').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "+"):
        page.press(key)
    page.wait("location.hash.includes('view.pass') && location.hash.includes('view.see')")
    again = browser.open(page.value("location.href"))
    again.wait(DONE)
    assert text(again, "#pass-details") == text(page, "#pass-details") != ""
    assert shown(again) == shown(page)
    first, second = (
        each.value("document.querySelector('#plan').toDataURL()") for each in (page, again)
    )
    assert first == second


@pytest.mark.full
def test_keys_reach_every_pass_and_its_needs_are_told(browser: Browser, served: str) -> None:
    page = open_case(browser, served, CASES["usual"])
    page.value("document.querySelector('#plan').focus()")
    row = expected(CASES["usual"])["rows"][0].split()
    page.press("ArrowRight")
    for name in row[:6]:
        told = text(page, "#pass-details")
        assert told.startswith(f"{name} on rank 0")
        assert ("Waits for nothing" in told) == name.startswith("IF")
        page.press("ArrowRight")


@pytest.mark.full
def test_a_row_edited_by_hand_is_checked(browser: Browser, served: str) -> None:
    page = open_case(browser, served, CASES["usual"])

    def write(change: str) -> None:
        page.value("document.body.dataset.state = 'left'")
        page.value(
            "{ const box = document.querySelector('#passes'); box.value = "
            f"box.value.{change}; box.dispatchEvent(new Event('input', {{ bubbles: true }})); }}"
        )
        page.wait(DONE)

    before = shown(page)
    write("replace(' F0 ', ' F1 ')")
    assert "rank 0 runs F1 twice" in text(page, "#edit-fault")
    assert shown(page) == before
    write("replace(' F1 F1 ', ' F1 F0 ')")
    assert text(page, "#edit-fault") == ""
    assert shown(page)["iteration_time"] > before["iteration_time"]
    assert "--schedule-file my.plan" in text(page, "#command")
    again = browser.open(page.value("location.href"))
    again.wait(DONE)
    assert shown(again) == shown(page)


@pytest.mark.full
def test_a_recorded_timeline_is_shown_beside_the_plan(
    browser: Browser, served: str, tmp_path: Path
) -> None:
    planned = Simulations().of(Case.of_json(CASES["usual"])).done.timeline
    spans = (*planned.spans, *planned.waits)
    slower = [span._replace(start=2 * span.start, end=2 * span.end) for span in spans]
    save_timeline(Timeline.of_lanes(planned.ranks, slower), tmp_path / "timeline.json")
    page = open_case(browser, served, CASES["usual"])
    content = json.dumps((tmp_path / "timeline.json").read_text())
    page.value(
        "{ const files = new DataTransfer(); files.items.add(new File(["
        f"{content}], 'run.json')); document.querySelector('#recorded').dispatchEvent("
        "new DragEvent('drop', { dataTransfer: files })); }"
    )
    page.wait("document.querySelector('#recorded-table td')")
    assert "run.json: time" in text(page, "#recorded-hint")
    rows = page.value(
        "[...document.querySelectorAll('#recorded-table tbody tr')].map((e) => e.innerText)"
    )
    for row in rows[:1] + rows[2:7]:  # times of the iteration and of passes
        _, one, other, ratio = row.split("\t")
        assert one == other
        assert ratio == "1"
    assert "of which 1 is taken as 2 s" in text(page, "#recorded-hint")
    same = (  # on one scale the two are alike, down to the axis
        "new Set(['plan', 'recorded-plan'].map((id) => { const canvas = "
        "document.getElementById(id); return canvas.getContext('2d').getImageData(0, 0, "
        "canvas.width, canvas.height - 25 * devicePixelRatio).data.join(); })).size === 1"
    )
    assert page.value(same)
    page.value("document.querySelector('#zoom-in').click()")
    assert page.value(same)
    page.value("document.querySelector('#plan').focus()")
    page.press("ArrowRight")
    told = [
        text(page, selector).split(":")[0] for selector in ("#pass-details", "#recorded-details")
    ]
    assert told[0].startswith(told[1])
    page.value("document.querySelector('#recorded-close').click()")
    assert page.faults == []


@pytest.mark.full
def test_all_schedules_are_compared(browser: Browser, served: str) -> None:
    page = open_case(browser, served, CASES["usual"])
    page.wait("document.body.dataset.compared == 16", 300)
    cells = page.value(
        "[...document.querySelectorAll('#compare-table tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    points = {own[0]: (float(own[2]), float(own[4])) for own in cells}
    for own in cells:
        better = [p for p in points.values() if p != points[own[0]]]
        beaten = any(p[0] <= points[own[0]][0] and p[1] <= points[own[0]][1] for p in better)
        assert (own[-1] == "yes") != beaten
    assert page.value("document.querySelectorAll('#scatter .point').length") == 16
    assert page.value("document.querySelectorAll('#scatter .point text').length") > 8
    assert page.value(f"({STRUCK})()") == [], "no label lies on the front, a point or a label"


@pytest.mark.full
def test_a_large_plan_is_drawn(
    browser: Browser, served: str, exported: str, record_property: Any
) -> None:
    """Times are reported, not asserted: the machine may be busy."""
    case = {**CASES["two barriers"], "p": 16, "m": 64}
    for where, address in (("served", served), ("in the browser", exported)):
        page = browser.open(address)
        page.wait(DONE)
        page.value("delete document.body.dataset.firstMs")
        page.value(f"location.hash = {fragment(case)!r}")
        page.wait("document.body.dataset.firstMs")
        first = page.value("Number(document.body.dataset.firstMs)")
        strokes = page.value(
            "(() => { const begun = performance.now(); "
            "document.querySelector('#zoom-fit').click(); return performance.now() - begun; })()"
        )
        record_property(f"first drawn, {where} (ms)", first)
        record_property(f"strokes, {where} (ms)", strokes)
        print(f"{where}: p = 16, m = 64 drawn after {first:.0f} ms, strokes {strokes:.0f} ms")
        assert page.faults == []
