"""Hostile timelines: each is read as it stands or refused in a line; no picture holds a script."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import pytest
from harness.damage import within

from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.compare import compare
from megatron.simulator.draw.picture import Panel, lay_out
from megatron.simulator.draw.svg import paint_svg
from megatron.simulator.draw.text import draw_text
from megatron.simulator.simulate import Timeline, simulate
from megatron.simulator.timeline_file import load_timeline, save_timeline

COUNT: Final = 90
PATIENCE: Final = 60
"""Seconds for a timeline; it takes some hundredths of one."""

SOUND: Final = simulate(lower(make_plan("1f1b", "vocab-2", 2, 2)))
LEAVES: Final[tuple[Any, ...]] = (
    *("", "x" * 5000, '"><script>alert(1)</script>', "</style><script>", "' onload='alert(1)"),
    *("F", "B", "S", "C1", "compute", "wait", "\u202eF", "\ud800", "&#x3c;"),
    *("F\x1b", "\x1b[2J", "F0\x1b]0;title\x07", "\0"),
    *(0, 1, 2, -1, 10**9, 10**15, 2**63, 10**400, 0.5, -0.5, 1e-300, 5e-324, 1e20, 1e300),
    *(float("nan"), float("inf"), float("-inf"), None, True, [], {}, [0], {"F": 1}),
)
TAGS: Final = {"svg", "g", "rect", "line", "text", "tspan", "title", "style", "path", "desc"}


def made(dice: random.Random) -> str:
    """Return the text of a timeline of which one to three values are not those of a run."""
    spans: list[dict[str, Any]] = [dict(span._asdict()) for span in (*SOUND.spans, *SOUND.waits)]
    document: dict[str, Any] = {"ranks": SOUND.ranks, "spans": spans}
    for _ in range(dice.choice((1, 1, 2, 3))):
        what, span = dice.random(), dice.choice(spans)
        if what < 0.7:
            span[dice.choice(sorted(span) or ["rank"])] = dice.choice(LEAVES)
        elif what < 0.75:
            span.pop(dice.choice(sorted(span) or [""]), None)
        elif what < 0.8:
            spans.append({**span, "microbatch": dice.choice((0, 1, 7))})
        elif what < 0.85:
            document[dice.choice(("ranks", "spans", "more"))] = dice.choice(LEAVES)
        elif what < 0.9:
            span["end"] = span.get("start")
        else:
            scale = dice.choice((1e-12, 1e12, 1e18))
            for own in spans:
                if isinstance(own.get("start"), float) and isinstance(own.get("end"), float):
                    own["start"], own["end"] = scale * own["start"], scale * own["end"]
    text = json.dumps(document)
    return text[: dice.randrange(len(text))] if dice.random() < 0.05 else text


def assert_harmless(svg: str) -> None:
    """Assert that a picture draws and does nothing else."""
    for element in ElementTree.fromstring(svg).iter():
        tag = element.tag.rpartition("}")[2]
        assert tag in TAGS, tag
        for name in element.attrib:
            assert not name.rpartition("}")[2].lower().startswith(("on", "href")), name


def refusal_of(work: Callable[[], object]) -> str:
    """Return the message with which something is refused; empty if it is done."""
    try:
        work()
    except ValueError as error:
        return str(error)
    return ""


def assert_drawn(timeline: Timeline) -> None:
    """Assert that a timeline is drawn, or refused in a line."""
    made: list[str] = []

    def draw() -> None:
        made.append(paint_svg(lay_out([Panel("title", timeline)])))
        made.append(draw_text(timeline, 100))

    if refusal := refusal_of(draw):
        assert len(refusal) < 1000
        return
    svg, printed = made
    assert_harmless(svg)
    assert all(character.isprintable() or character == "\n" for character in printed)


@pytest.mark.parametrize("number", range(COUNT))
def test_a_timeline_is_read_as_it_stands_or_refused(number: int, tmp_path: Path) -> None:
    text, path = made(random.Random(number)), tmp_path / "timeline.json"
    path.write_text(text)
    with within(PATIENCE):
        if refusal := refusal_of(lambda: load_timeline(path)):
            assert refusal.startswith(f"{path} holds no timeline")
            assert len(refusal) < 1000 + len(str(path))
            return
        found, document = load_timeline(path), json.loads(text)
        assert found.ranks == document["ranks"]
        told = [(*span.values(), *[0][: "slice" not in span]) for span in document["spans"]]
        assert sorted(map(tuple, (*found.spans, *found.waits))) == sorted(told)
        assert_drawn(found)
        for first, second in ((SOUND, found), (found, SOUND), (found, found)):
            assert "JSON" not in refusal_of(partial(compared, first, second))


def compared(first: Timeline, second: Timeline) -> str:
    """Return a comparison as strict JSON."""
    return json.dumps(compare(first, second).as_json(), allow_nan=False)


def test_the_sound_timeline_is_read_and_drawn(tmp_path: Path) -> None:
    save_timeline(SOUND, tmp_path / "timeline.json")
    assert_drawn(load_timeline(tmp_path / "timeline.json"))
    assert_harmless(paint_svg(lay_out([Panel("<script>&\"'", SOUND)])))
