"""The pictures of docs/how-it-works.md are current, and show what was worked out by hand."""

import re
from pathlib import Path

import pytest

from megatron.simulator.draw.picture import Picture
from megatron.simulator.draw.svg import paint_svg
from tools.diagrams import IMAGES, PICTURES, cut_sequence, grid, main, one_microbatch

PAGE = (IMAGES.parent / "docs" / "how-it-works.md").read_text(encoding="utf-8")


def rows_of(picture: Picture, number: int) -> list[list[str]]:
    """Return the names of the passes of each row of the ``number``-th timeline, by time."""
    ranks = [label for label in picture.labels if re.fullmatch(r"rank \d", label.text)]
    starts = [i for i, label in enumerate(ranks) if label.text == "rank 0"] + [len(ranks)]
    return [
        [
            name.text
            for name in sorted(picture.labels, key=lambda label: label.x)
            if name.role == "number" and abs(name.y - rank.y) < 3
        ]
        for rank in ranks[starts[number] : starts[number + 1]]
    ]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_in_the_repository_is_what_the_tool_draws(name: str) -> None:
    assert paint_svg(PICTURES[name]()) == (IMAGES / name).read_text(encoding="utf-8"), (
        "run python tools/diagrams.py"
    )
    assert f"](../images/{name})" in PAGE


def test_the_tool_draws_into_the_folder_that_it_is_given(tmp_path: Path) -> None:
    main(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == set(PICTURES)


def test_a_microbatch_passes_all_ranks_between_two_lookups() -> None:
    """The barrier C1 holds back T of all ranks, and B of the last rank, which then delays its T."""
    first = ["IF", "F", "S", "T", "B", "IB"]
    assert rows_of(one_microbatch(), 0) == [first, first, first, ["IF", "F", "S", "B", "T", "IB"]]
    bands = [box for box in one_microbatch().boxes if box.look == "comm"]
    assert [band.kind for band in sorted(bands, key=lambda band: band.x)] == [
        "CIF",
        "C0",
        "C1",
        "CIB",
    ]


def test_messages_go_down_in_the_forward_and_up_in_the_backward() -> None:
    """X and G of three hops. An arrow is a line and two short ones, which make its head."""
    shafts = one_microbatch().lines[::3]
    assert [line.to_y > line.y for line in sorted(shafts)] == [True] * 3 + [False] * 3


def test_backwards_of_slices_come_in_the_opposite_order() -> None:
    whole, cut = rows_of(cut_sequence(), 0), rows_of(cut_sequence(), 1)
    assert whole == [["F", "B"]] * 3
    assert cut == [[*(f"F/{i}" for i in range(4)), *(f"B/{i}" for i in (3, 2, 1, 0))]] * 3


def test_ranks_and_shards_follow_the_formulas() -> None:
    """The rank tp changes fastest, then cp, dp and pp; shard t pp + tp. t = c = d = 2, p = 4."""
    cells = [label for label in grid().labels if re.match(r"(rank|shard) \d+$", label.text)]
    at = {(tp, cp, dp, pp) for tp in (0, 1) for cp in (0, 1) for dp in (0, 1) for pp in range(4)}
    expected = {(tp + 2 * cp + 4 * dp + 8 * pp, 2 * pp + tp) for tp, cp, dp, pp in at}
    words = [label.text.split()[1] for label in cells]
    assert {(int(r), int(k)) for r, k in zip(words[::2], words[1::2], strict=True)} == expected
    yellow = [i for i, box in enumerate(grid().boxes) if box.kind == "S"]
    assert [words[2 * i] for i in yellow] == ["0", "1", "8", "9", "16", "17", "24", "25"]
    sentences = " ".join(label.text for label in grid().labels)
    for name, ranks in {"tensor": "0, 1", "context": "0, 2", "data": "0, 2, 4, 6"}.items():
        assert f"axis {name} of rank 0: ranks {ranks} " in sentences
