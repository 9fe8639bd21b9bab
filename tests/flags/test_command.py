"""A tool's command line follows from the declarations of its flags."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron.flags.command import read, read_command, reading
from megatron.flags.declare import flag, positional, required
from megatron.flags.groups import Flags
from megatron.flags.ranges import COUNT


def size(text: str) -> Sequence[int]:
    wide, cross, high = text.partition("x")
    if not cross or not wide.isdecimal() or not high.isdecimal():
        raise ValueError("give WIDExHIGH, as 3x4")
    return int(wide), int(high)


@dataclass(frozen=True)
class PaintFlags:
    """Paint.

    More about it, which no help shows.
    """

    colours: tuple[str, ...] = flag(("red",), "To mix.", choices=("red", "blue"))
    hours: tuple[int, ...] = flag((), "Hours.")
    share: float = flag(0.5, "Of the second.")
    coats: int = flag(1, "To paint.", COUNT, names=("-c", "--layers"))
    size: Sequence[int] | None = flag(None, "Of the wall.", unset="all", metavar="WxH", reads=size)
    glossy: bool = flag(False, "Shine.", needs="--coats")
    words: tuple[str, ...] = flag((), "To write.", repeats=True, reads=str, unset="none")
    brushes: tuple[int, ...] = flag((2, 3), "Widths.", may_be_empty=True)
    dry_hours: int = flag(1, "Between coats.")
    turn: int = flag(0, "Which is under way.", hidden=True)


@dataclass(frozen=True)
class WallFlags:
    """Walls."""

    house: Path = positional("Where they stand.", "HOUSE")
    wall: str = positional("Its name.", "WALL")
    wet: bool = flag(False, "Already.")
    doors: tuple[int, ...] = flag((), "To leave out.", unset="none")
    since: int | None = flag(None, "The year.", unset="unknown", excludes="--wet")


@dataclass(frozen=True)
class FenceFlags:
    """Fences."""

    garden: str = positional("Where they stand.", "GARDEN")
    boards: tuple[Path, ...] = positional("Their boards.", "BOARD", repeats=True)
    wet: bool = flag(False, "Already.")


@dataclass(frozen=True)
class RoofFlags:
    """A roof."""

    form: Literal["flat", "steep"] = required("Its form.")


def paint(words: str) -> PaintFlags:
    found = reading(words.split(), (PaintFlags,))
    assert not found.mistakes
    return found.flags[PaintFlags]


def mistakes(words: str, *groups: type) -> list[str]:
    return list(reading(words.split(), groups or (PaintFlags,)).mistakes)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("", "colours", ("red",)),
        ("--colours blue red", "colours", ("blue", "red")),
        ("--share=-1.5", "share", -1.5),
        ("--share -1.5", "share", -1.5),
        ("--share -1e-3", "share", -0.001),
        ("--coats 3", "coats", 3),
        ("-c 3", "coats", 3),
        ("-c3", "coats", 3),
        ("-c=3", "coats", 3),
        ("--layers=3", "coats", 3),
        ("--lay 3", "coats", 3),
        ("--coats 2 --coats 3", "coats", 3),
        ("--size 3x4", "size", (3, 4)),
        ("--glossy", "glossy", True),
        ("--words a --share 1 --words=--b --words -x", "words", ("a", "--b", "-x")),
        ("--words=", "words", ("",)),
        ("--brushes", "brushes", ()),
        ("--brushes -1 4", "brushes", (-1, 4)),
        ("--turn 4", "turn", 4),
        ("--dry_hours 2", "dry_hours", 2),
    ],
)
def test_words_make_values(words: str, name: str, value: object) -> None:
    assert getattr(paint(words), name) == value


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--coats 0", "--coats 0: must be at least 1 and at most 1,000,000,000"),
        ("-c x", "--coats x: must be a whole number"),
        ("--coats 1 2", "--coats 1 2: takes one value, INT, got 2"),
        ("--coats", "--coats: takes one value, INT, got 0"),
        ("--colours", "--colours: nothing stands behind it; give {red,blue} ..."),
        ("--colours red green", "--colours green: choose one of red, blue"),
        ("--size 3", "--size 3: give WIDExHIGH, as 3x4"),
        ("--glossy yes", "--glossy takes no value, got 'yes'"),
        ("--colour-s red", "--colour-s is no flag: did you mean --colours? see --help"),
        ("--words --hours 1", "--words: takes one value, STR, got 0"),
        ("--zzz", "--zzz is no flag: see --help"),
        ("--s 1", "--s may be --share or --size: write it out"),
        ("red --glossy", "'red' stands before any flag: leave it out, or write its flag first"),
        ("--coats 1 --layers x", "--coats x: must be a whole number"),
    ],
)
def test_a_mistake_names_the_flag_and_the_way_out(words: str, fault: str) -> None:
    assert mistakes(words) == [fault]


def test_all_mistakes_are_told_at_once() -> None:
    told = mistakes("--coats 0 --share x --zzz --wet --since 3 --form", PaintFlags, WallFlags)
    assert [line.split()[0] for line in told] == [
        "--share",
        "--zzz",
        "--form",
        "--coats",
        "HOUSE",
        "WALL",
        "--since",
    ]


def walls(words: str) -> WallFlags:
    found = reading(words.split(), (WallFlags,))
    assert not found.mistakes
    return found.flags[WallFlags]


@pytest.mark.parametrize("words", ["a b --wet --doors 1 2", "a --wet b --doors 1 2", "--wet a b "])
def test_words_are_told_by_their_place(words: str) -> None:
    found = walls(words)
    assert (found.house, found.wall, found.wet) == (Path("a"), "b", True)
    assert found.doors == ((1, 2) if "--doors" in words else ())


def test_a_flag_leaves_to_places_what_it_does_not_take() -> None:
    assert walls("--since 1999 a b").house == Path("a")
    assert mistakes("--wet a", WallFlags) == ["WALL is missing: Its name."]
    assert mistakes("a b c", WallFlags) == [
        "'c' stands behind HOUSE WALL: leave it out, or write its flag first"
    ]
    assert mistakes("--quite a", WallFlags) == ["--quite is no flag: see --help"]
    assert mistakes("-x b", WallFlags) == [
        "HOUSE -x: no value begins with '-'; a file of this name is ./-x"
    ]


@pytest.mark.parametrize("words", ["g a b c", "g a --wet b c", "--wet g a b c"])
def test_the_last_place_takes_all_words_that_are_left_if_it_repeats(words: str) -> None:
    found = reading(words.split(), (FenceFlags,))
    assert not found.mistakes
    assert found.flags[FenceFlags].boards == (Path("a"), Path("b"), Path("c"))
    assert found.flags[FenceFlags].wet == ("--wet" in words)


def test_a_place_that_repeats_has_one_word_at_least() -> None:
    assert mistakes("g", FenceFlags) == ["BOARD is missing: Their boards."]
    assert mistakes("g a -x", FenceFlags) == [
        "BOARD -x: no value begins with '-'; a file of this name is ./-x"
    ]


def never_red(flags: Flags) -> Iterator[str]:
    if "red" in flags[PaintFlags].colours:
        yield "--colours red: take another"


def test_rules_speak_of_sound_values_only() -> None:
    found = reading([], (PaintFlags,), (never_red,))
    assert found.mistakes == ("--colours red: take another",)
    assert reading(["--colours", "green"], (PaintFlags,), (never_red,)).mistakes == (
        "--colours green: choose one of red, blue",
    )


def test_a_repeated_flag_is_noted() -> None:
    (note,) = reading(["-c", "2", "--coats", "3"], (PaintFlags,)).notes
    assert note == "--coats 2 changes nothing: --coats 3 stands after it"


def ended(call: Any) -> int:
    with pytest.raises(SystemExit) as caught:
        call()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_mistakes_end_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(lambda: read(["--coats", "0"], "Paints.", PaintFlags)) == 2
    assert capsys.readouterr() == (
        "",
        "error: --coats 0: must be at least 1 and at most 1,000,000,000\n",
    )
    assert ended(lambda: read(["--coats", "0", "--zzz"], "Paints.", PaintFlags)) == 2
    assert capsys.readouterr().err == (
        "error:\n--zzz is no flag: see --help\n"
        "--coats 0: must be at least 1 and at most 1,000,000,000\n"
    )


def test_help_shows_every_flag_but_the_hidden_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(lambda: read(["--help"], "Paints.", PaintFlags, WallFlags)) == 0
    printed = capsys.readouterr().out
    for line in (
        "Paints.",
        "Paint:",
        "  --hours INT ...\n        Hours. (default: none)",
        "  --coats, -c, --layers INT\n        To paint. (default: 1)",
        "  --colours {red,blue} ...\n        To mix. (default: red)",
        "  --glossy\n        Shine. (default: off)",
        "  --size WxH\n        Of the wall. (default: all)",
        "  HOUSE\n        Where they stand. (required)",
        "  WALL\n        Its name. (required)",
    ):
        assert f"\n{line}\n" in printed
    assert " HOUSE WALL [flags]" in printed.splitlines()[0]
    assert "--turn" not in printed
    assert "no help" not in printed
    assert max(map(len, printed.splitlines())) <= 100


COMMANDS = {"walls": WallFlags, "roof": RoofFlags}


def test_a_subcommand_has_flags_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    flags = read_command(["roof", "--form", "flat"], "Builds.", COMMANDS)
    assert flags == RoofFlags("flat")
    for words, fault in (
        ([], "a command is missing: give one of walls, roof"),
        (["rof"], "rof is no command: did you mean roof? give one of walls, roof"),
        (["roof"], "--form is missing: Its form."),
        (["roof", "--wet", "--form", "flat"], "--wet is no flag: see --help"),
    ):
        assert ended(lambda words=words: read_command(words, "Builds.", COMMANDS)) == 2
        assert capsys.readouterr().err == f"error: {fault}\n"
    assert ended(lambda: read_command(["--help"], "Builds.", COMMANDS)) == 0
    assert "\n  walls         Walls\n" in capsys.readouterr().out
    assert ended(lambda: read_command(["roof", "-h"], "Builds.", COMMANDS)) == 0
    assert "--form {flat,steep}" in capsys.readouterr().out


def test_a_subcommand_may_hand_flags_on() -> None:
    words = ["walls", "a", "--lr", "1e-3", "--wet", "b", "--betas=1", "2"]
    others: dict[str, list[str]] = {"walls": []}
    flags = read_command(words, "Builds.", COMMANDS, others)
    assert (flags.house, flags.wall, flags.wet) == (Path("a"), "b", True)
    assert others["walls"] == ["--lr", "1e-3", "--betas", "1", "2"]
