"""A word @FILE of a command line stands for the flags of a file."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from command_lines import with_flags
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.run import flag_files
from megatron.run.command_line import parse, read
from megatron.run.flag_files import MOST_DEEP, MOST_FILES, read_flag_files, without_comment
from megatron.run.line import Line

USUAL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 4 --device cpu --mock-data --vocab-size 99"
)
BASE = USUAL.split()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, *lines: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(f"{line}\n" for line in lines))


def mistakes(*words: str) -> tuple[str, ...]:
    return read([*BASE, *words], 1, speak=False).mistakes


def notes(*words: str) -> tuple[str, ...]:
    return read([*BASE, *words], 1, speak=False).notes


def test_flags_of_a_file_are_those_that_are_typed() -> None:
    write("model", "# a model", "", "--num-layers 4  # deep", "--squared-relu", "--seq_length=16")
    in_file = parse(with_flags(BASE, ["@model"]), 1)
    flags = "--num-layers 4 --squared-relu --seq-length 16"
    typed = parse(with_flags(BASE, flags.split()), 1)
    assert in_file.model == typed.model
    words = Line.of(["@model", "--lr", "1"], 1).words
    assert words == ("--num-layers", "4", "--squared-relu", "--seq-length", "16", "--lr", "1")


@pytest.mark.parametrize(
    "line",
    [
        "--a 'two words' b#c d # comment",
        r"--a \#x '#y' \" 'it'\''s' # \ ",
        '--a "x # y" "" "a\\"b #"#c',
        "--a 'x'\t#no",
        "--a #",
    ],
)
def test_words_are_quoted_as_in_a_shell(line: str) -> None:
    shell = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, text=True
    )
    assert shlex.split(without_comment(line)) == shell.stdout.split("\0")[:-1]


_VALUES = st.sampled_from(["--lr", "--min-lr", "--weight-decay", "--clip-grad"])


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(_VALUES, st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=12))
def test_the_last_of_some_flags_holds_wherever_it_stands(
    found: list[tuple[str, int, int]],
) -> None:
    """Every flag stands on the line or in one of two files; the files are named where it stands."""
    words = list[str]()
    for at, (option, value, place) in enumerate(found):
        if place:
            write(f"f{at}", f"{option} {value}")
        words += [f"@f{at}"] if place else [option, str(value)]
    expected = {option: [str(value)] for option, value, _ in found}
    reading = read([*BASE, *words], 1, speak=False)
    assert {option: list(reading.flags.given[option]) for option in expected} == expected


def test_a_note_says_which_flag_replaces_which() -> None:
    write("a", "--lr 1", "--seq-length 8")
    write("b", "--lr 2")
    told = [note for note in notes("@a", "@b", "--lr", "3") if "--lr" in note]
    assert "--lr 1 (a, line 1) changes nothing: --lr 3 stands after it" in told
    assert "--lr 2 (b, line 1) changes nothing: --lr 3 stands after it" in told
    assert notes("@b")[0] == f"@b is read as 1 flag of {Path('b')}"


def test_a_flag_replaces_another_name_and_a_flag_that_it_excludes() -> None:
    write("a", "--tensor-model-parallel-size 2", "--bf16", "--train-iters 7", "--swiglu")
    later = "--model-parallel-size 1 --fp16 --train-samples 9 --squared-relu"
    base = [word for word in BASE if word not in ("--train-iters", "4")]
    found = read([*base, "@a", *later.split()], 1, speak=False)
    assert not found.mistakes
    assert found.flags.given.keys() & {"--bf16", "--train-iters", "--swiglu"} == set()
    assert len([note for note in found.notes if "(a, line" in note]) == 4


def test_flags_of_one_file_that_exclude_each_other_are_refused() -> None:
    write("a", "--bf16", "--fp16")
    assert any("--bf16" in line and "--fp16" in line for line in mistakes("@a"))


def test_a_file_names_others_from_its_own_folder() -> None:
    write("models/small", "@sizes/few", "--swiglu")
    write("models/sizes/few", "--num-layers 3")
    assert read_flag_files(["@models/small"]).words == ["--num-layers", "3", "--swiglu"]


def test_files_that_name_each_other_end_in_an_error() -> None:
    write("a", "@b")
    write("b", "@a")
    [line] = read_flag_files(["@a"]).mistakes
    assert line.startswith("@a (named in b) names itself")


def test_files_are_read_to_a_depth_and_a_number() -> None:
    for depth in range(MOST_DEEP + 1):
        write(f"f{depth}", f"@f{depth + 1}")
    write(f"f{MOST_DEEP + 1}", "--lr 1")
    assert f"more than {MOST_DEEP} files deep" in read_flag_files(["@f0"]).mistakes[0]
    assert read_flag_files(["@f2"]).words == ["--lr", "1"]
    write("many", *["@leaf"] * (3 * MOST_FILES))
    write("leaf", "--lr 1")
    found = read_flag_files(["@many"])
    assert len(found.flags) == MOST_FILES - 1
    assert found.mistakes == [f"@leaf is flag file {MOST_FILES + 1}: name {MOST_FILES} at most"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--lr '1", "no closing quotation"),
        ("--lr 1 --seq-length 8", "--seq-length stands behind --lr"),
        ("lr 1", "'lr' is no flag: a line is --flag VALUE"),
        ("@b --lr", "'--lr' stands behind @b"),
        ("--lr @b", "write --lr=@b"),
        ("@", "@ (named in a) names no file"),
        ("--no-such-flag 1", "--no-such-flag is no flag"),
        ("--lr x", "--lr"),
    ],
)
def test_a_mistake_names_the_file_and_the_line(line: str, told: str) -> None:
    write("a", "--seed 1", line)
    [found] = mistakes("@a")
    assert told in found
    assert "a, line 2" in found or "named in a" in found


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff", r"is no text \(byte 1\)"),
        (b"a\0", "is no text"),
        ("device", "is a device, not a file"),
        ("folder", "is a folder, not a file"),
        ("pipe", "is a pipe, not a file"),
        ("huge", "has more than .* bytes"),
    ],
    ids=["binary", "zeros", "device", "folder", "pipe", "huge"],
)
def test_what_is_no_flag_file_is_refused(content: bytes | str, told: str, folder: Path) -> None:
    path = Path("/dev/zero") if content == "device" else folder / "file"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    elif content == "pipe":
        os.mkfifo(path)
    elif content == "huge":
        path.touch()
        os.truncate(path, flag_files.MOST_BYTES + 1)
    with pytest.raises(ValueError, match=rf"@{path} {told}"):
        parse([*BASE, f"@{path}"], 1)


def test_a_recipe_is_found_unless_a_file_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    write("installed/tiny.2xCPU.flags", "--num-layers 5")
    monkeypatch.setattr(flag_files, "RECIPES", Path("installed").resolve())
    for name in ("tiny.2xCPU", "tiny.2xCPU.flags", "recipes/tiny.2xCPU"):
        assert read_flag_files([f"@{name}"]).words == ["--num-layers", "5"]
    Path("tiny.2xCPU").mkdir()  # a folder of a model, which is no flag file
    assert read_flag_files(["@tiny.2xCPU"]).words == ["--num-layers", "5"]
    write("recipes/tiny.2xCPU", "--num-layers 6")
    assert read_flag_files(["@recipes/tiny.2xCPU"]).words == ["--num-layers", "6"]
    [line] = read_flag_files(["@tiny.2CPU"]).mistakes
    assert "did you mean tiny.2xCPU?" in line


def test_a_word_behind_a_file_is_refused() -> None:
    write("a", "--lr 1")
    assert "'8' stands behind @a" in mistakes("@a", "8")[0]


def test_a_value_that_begins_with_the_sign_is_joined_to_its_flag() -> None:
    assert read_flag_files(["--data-path=@x"]).flags[0].values == ("@x",)


def test_a_name_that_no_file_can_have_is_a_mistake() -> None:
    [line] = read_flag_files(["@" + 300 * "x"]).mistakes
    assert "is no file" in line
    assert "--flag=@" in line
