"""The picture holds every span, in its place, and can be read."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import COMM_KINDS
from megatron.schedules.passes import CHUNKED_KINDS, PASS_KINDS, Pass
from megatron.simulator.draw.palette import COLOURS, GLYPH, MEANINGS
from megatron.simulator.draw.picture import WIDTH, Panel, lay_out
from megatron.simulator.draw.stretches import Window
from megatron.simulator.draw.svg import paint_svg
from megatron.simulator.simulate import Span, Timeline, pair_spans, simulate

ROOT = Path(__file__).resolve().parents[3]
SVG = "{http://www.w3.org/2000/svg}"


def draw_svg(panels: list[Panel], width: int = WIDTH) -> str:
    return paint_svg(lay_out(panels, width))


def boxes(svg: str) -> list[dict[str, str]]:
    """Return the attributes, tooltip included, of every box that stands for a span."""
    found = []
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None:
            found.append({**rect.attrib, "tooltip": title.text or ""})
    return found


def texts(svg: str, kind: str | None = None) -> list[str]:
    elements = ElementTree.fromstring(svg).iter(f"{SVG}text")
    return [e.text or "" for e in elements if kind is None or e.get("class") == kind]


def passes_on_one_rank(*times: tuple[float, float]) -> Timeline:
    spans = (Span(0, "compute", f"F{i}", "F", i, 0, *t) for i, t in enumerate(times))
    return Timeline(1, tuple(spans))


@settings(max_examples=examples(20), deadline=None)
@given(
    schedule=st.sampled_from(["1f1b", "zb-h1", "v-half"]),
    vocabulary=st.sampled_from(["none", "naive", "vocab-1", "vocab-2", "interlaced"]),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 5),
    comm=st.floats(0.05, 2),
)
def test_every_span_is_a_box_and_boxes_of_a_row_do_not_overlap(
    schedule: str, vocabulary: str, ranks: int, microbatches: int, comm: float
) -> None:
    costs = Costs(UNIT_COSTS.passes, dict.fromkeys(COMM_KINDS, comm))
    plan = make_plan(schedule, vocabulary, ranks, microbatches, costs)
    timeline = simulate(lower(plan, costs), costs)
    svg = draw_svg([Panel("a plan", timeline)], 900)
    drawn = boxes(svg)
    longest = {span.label: span.end - span.start for span in timeline.spans}
    shown = dict.fromkeys(longest, 0.0)
    for box in drawn:
        shown[box["tooltip"].split(":")[0]] += float(box["width"])
    count = Counter(span.label for span in timeline.spans)
    scale = sum(shown.values()) / sum(s.end - s.start for s in timeline.spans)
    for label, length in longest.items():
        assert shown[label] == pytest.approx(scale * length * count[label], rel=0.01, abs=0.1)
    rows: dict[str, list[tuple[float, float]]] = {}
    for box in drawn:
        x, length = float(box["x"]), float(box["width"])
        rows.setdefault(box["y"], []).append((x, x + length))
        assert 0 <= x <= x + length <= 900
    for row in rows.values():
        row.sort()
        assert all(end <= start + 0.03 for (_, end), (start, _) in pairwise(row))
    height = float(ElementTree.fromstring(svg).attrib["height"])
    assert all(0 <= float(b["y"]) <= float(b["y"]) + float(b["height"]) <= height for b in drawn)


def test_all_panels_share_one_scale() -> None:
    short, long = passes_on_one_rank((0, 1)), passes_on_one_rank((0, 2), (2, 8))
    widths = [float(b["width"]) for b in boxes(draw_svg([Panel("a", short), Panel("b", long)]))]
    assert widths == pytest.approx([widths[0], 2 * widths[0], 6 * widths[0]], abs=0.02)


def test_time_is_counted_from_the_first_span() -> None:
    early, late = passes_on_one_rank((0, 2), (2, 3)), passes_on_one_rank((70, 72), (72, 73))
    places = [
        [(b["x"], b["width"]) for b in boxes(draw_svg([Panel("a", t)]))] for t in (early, late)
    ]
    assert places[0] == places[1]


def test_a_number_stands_only_where_it_has_room() -> None:
    wide, narrow = (0, 50), (50, 50.2)
    assert texts(draw_svg([Panel("a", passes_on_one_rank(wide, narrow))]), "number") == ["0"]


@pytest.mark.parametrize("count", [10, 100])
def test_the_usual_pass_has_room_for_its_number_and_the_picture_is_not_wider_for_it(
    count: int,
) -> None:
    """Also where one is a hundred times as long: strips follow, each may cut one pass in two."""
    times = [(float(i), float(i + 1)) for i in range(count - 1)] + [(count - 1.0, count + 99.0)]
    svg = draw_svg([Panel("a", passes_on_one_rank(*times))])
    numbers = {str(i) for i in range(count)}
    assert set(texts(svg, "number")) <= numbers
    assert len(numbers - set(texts(svg, "number"))) < len(texts(svg, "title"))
    assert float(ElementTree.fromstring(svg).attrib["width"]) <= WIDTH


def test_numbers_stand_clear_of_the_edges_of_their_boxes() -> None:
    costs = Costs({"F": 1, "B": 2, "S": 0.25, "T": 0.4, "IF": 0.01, "IB": 0.01})
    picture = lay_out(
        [Panel("a", simulate(lower(make_plan("1f1b", "vocab-2", 4, 12, costs), costs), costs))]
    )
    numbers = [label for label in picture.labels if label.role == "number"]
    passes = [box for box in picture.boxes if box.look == "pass" and box.note]
    assert len(numbers) >= 2 * 4 * 12
    for label in numbers:
        half = GLYPH * len(label.text) / 2
        around = [
            box
            for box in passes
            if box.y < label.y < box.y + box.height
            and box.x + 1.9 <= label.x - half
            and label.x + half <= box.x + box.width - 1.9
        ]
        assert [box.note.split(":")[0][1:] for box in around] == [label.text]


def test_strips_show_the_same_time_of_all_panels_below_one_another() -> None:
    """100 passes of the first panel and 40 of the second, each as wide as two digits."""
    long, short = (passes_on_one_rank(*((i, i + 1) for i in range(n))) for n in (100, 40))
    svg = draw_svg([Panel("long", long), Panel("short", short)], 58 + 20 + 25 * 16)
    titles = texts(svg, "title")
    assert titles[:4] == ["long", "short"] * 2
    assert set(titles[4:]) == {"long"}


def test_a_window_shows_its_part_only() -> None:
    timeline = passes_on_one_rank(*((i, i + 1) for i in range(20)))
    drawn = boxes(paint_svg(lay_out([Panel("a", timeline)], window=Window(4.5, 7))))
    assert [box["tooltip"].split(":")[0] for box in drawn] == ["F4", "F5", "F6"]
    widths = [float(box["width"]) for box in drawn]
    assert widths == pytest.approx([widths[1] / 2, widths[1], widths[1]], abs=0.02)
    assert drawn[0]["tooltip"] == "F4: 4 to 5"


def test_what_takes_no_time_is_left_out() -> None:
    assert len(boxes(draw_svg([Panel("a", passes_on_one_rank((0, 1), (1, 1)))]))) == 1


def test_the_legend_names_what_is_drawn_and_nothing_else() -> None:
    drawn = draw_svg([Panel("a", simulate(lower(make_plan("1f1b", "vocab-2", 2, 2))))])
    shown = {t.split()[0] for t in texts(drawn) if t in {f"{k} {m}" for k, m in MEANINGS.items()}}
    assert shown == {"F", "B", "S", "T", "IF", "IB"}


def test_every_kind_has_a_colour_and_a_meaning() -> None:
    tokens = {f"tokens-{kind}" for kind in CHUNKED_KINDS}
    assert set(COLOURS) == set(MEANINGS) == {*PASS_KINDS, *COMM_KINDS, *tokens}
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_later_chunks_look_different() -> None:
    spans = (Span(0, "compute", "F0", "F", 0, 0, 0, 1), Span(0, "compute", "F0.1", "F", 0, 1, 1, 2))
    first, second = boxes(draw_svg([Panel("a", Timeline(1, spans))]))
    assert first["class"] != second["class"]


def test_the_legend_says_what_paler_means_only_where_something_is() -> None:
    spans = (Span(0, "compute", "F0", "F", 0, 0, 0, 1), Span(0, "compute", "F0.1", "F", 0, 1, 1, 2))
    for shown, expected in ((spans, 1), (spans[:1], 0)):
        legend = texts(draw_svg([Panel("a", Timeline(1, shown))]), "plain")
        assert sum("paler" in text for text in legend) == expected


def test_a_bar_lies_over_each_pair_and_only_there() -> None:
    pair = pair_spans(0, (Pass("F", 1), Pass("B", 0)), 1.0, 2.0, 4.0)
    alone = (Span(0, "compute", "F0", "F", 0, 0, 0, 1), Span(0, "compute", "W0", "W", 0, 0, 4, 5))
    for spans, expected in ((alone, []), ((*alone, *pair), ["F1 beside B0", "B0 beside F1"])):
        picture = lay_out([Panel("a", Timeline(1, spans))])
        paired = [box for box in picture.boxes if box.note.split(":")[0] in expected]
        bars = [box for box in picture.boxes if box.look == "pair"]
        assert len(paired) == len(bars) == len(expected)
        assert sum("a pair" in label.text for label in picture.labels) == bool(expected)
        if bars:
            (first, second), (begin, end) = bars, paired
            assert begin.x < first.x < first.x + first.width == pytest.approx(second.x)
            assert second.x + second.width < end.x + end.width


def test_a_pair_is_drawn_in_segments_with_the_travels_of_its_tokens_below() -> None:
    pair = pair_spans(0, (Pass("F", 12), Pass("B", 3)), 0.0, 4.0, 8.0)
    forward, backward = pair
    work = [
        forward._replace(lane="work", start=0, end=3),
        backward._replace(lane="work", start=4, end=8),
    ]
    tokens = [
        backward._replace(lane="tokens", start=0, end=4),
        forward._replace(lane="tokens", start=4, end=6),
    ]
    alone = Span(0, "compute", "F4", "F", 4, 0, 8, 12)
    timeline = Timeline(1, (*pair, alone), segments=(*work, *tokens))
    picture = lay_out([Panel("a", timeline)])
    row = [box for box in picture.boxes if box.look == "pass" and box.note]
    assert [box.note for box in row] == [
        "F12 beside B3: 0 to 3",
        "B3 beside F12: 4 to 8",
        "F4: 8 to 12",
    ]
    below = [box for box in picture.boxes if box.look == "comm"]
    assert [(box.kind, box.note) for box in below] == [
        ("tokens-B", "tokens of B3: 0 to 4"),
        ("tokens-F", "tokens of F12: 4 to 6"),
    ]
    assert [box.x for box in below] == [row[0].x, row[1].x]
    assert {box.y for box in below} == {row[0].y + row[0].height + 1}
    assert [label.text for label in picture.labels if label.role == "number"] == ["12|3", "4"]
    legend = [label.text for label in picture.labels if "travel" in label.text]
    assert legend == [MEANINGS["tokens-F"], MEANINGS["tokens-B"]]


def test_a_title_is_text_and_not_markup() -> None:
    svg = draw_svg([Panel("p < 4 & m > 2", passes_on_one_rank((0, 1)))])
    assert texts(svg, "title") == ["p < 4 & m > 2"]


@pytest.mark.parametrize(
    ("panels", "width", "message"),
    [
        ([], 900, "at least one timeline"),
        ([Panel("empty", Timeline(2, ()))], 900, "'empty' has nothing to draw"),
        ([Panel("still", passes_on_one_rank((1, 1)))], 900, "'still' has nothing to draw"),
        ([Panel("a", passes_on_one_rank((0, 1)))], 50, "width 50 has no room"),
    ],
)
def test_nothing_to_draw_is_refused(panels: list[Panel], width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_svg(panels, width)


@pytest.mark.full  # tests/commands/test_draw_schedule.py does it with the plans that are drawn
def test_the_pictures_in_the_repository_are_what_the_tool_draws(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/draw.py"), "--into", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    kept = {name: (ROOT / "images" / name).read_text() for name in drawn}
    assert "1f1b_vocab.svg" in drawn
    assert drawn == kept, "run python tools/draw.py"
