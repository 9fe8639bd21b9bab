"""What a message shows of the words of users and of files."""

import pytest

from megatron.flags.readable import LONGEST, as_error, readable, told_as_error


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("--lr 1e-3: fine\n\tsecond line", "--lr 1e-3: fine\n\tsecond line"),
        ("--num-layers \u200b2", "--num-layers \\u200b2"),
        ("--hidden-size 6\u202e4", "--hidden-size 6\\u202e4"),
        ("\ufeff--lr\u00a01", "\\ufeff--lr\\xa01"),
        ("a\x1b[31mb\udcff\x00", "a\\x1b[31mb\\udcff\\x00"),
        ("größe 数 é", "größe 数 é"),
    ],
)
def test_what_nobody_sees_stands_as_its_number(message: str, shown: str) -> None:
    assert readable(message) == shown


def test_a_long_word_loses_its_middle_and_others_nothing() -> None:
    path = "/tmp/" + "x" * (LONGEST - 5)
    assert readable(f"{path} is a file") == f"{path} is a file"
    shown = readable(f"--lr {'12' * 2500}: must be a number, got\n{'9' * 5000}")
    first, second = shown.split("\n")
    assert first.startswith("--lr 1212")
    assert first.endswith("12: must be a number, got")
    assert max(map(len, (first, second))) < LONGEST
    assert readable(shown) == shown


def test_an_error_of_a_kind_ends_in_words_and_another_keeps_its_traceback() -> None:
    with pytest.raises(SystemExit) as ended, told_as_error(ValueError, OSError):
        raise ValueError(f"--step \u200b{'9' * 5000}: no such step")
    assert str(ended.value.code).startswith("error: --step \\u200b999")
    assert len(str(ended.value.code)) < LONGEST
    with pytest.raises(KeyError), told_as_error(ValueError, OSError):
        raise KeyError("a fault of ours")
    assert as_error("one\nanother") == "error:\none\nanother"
