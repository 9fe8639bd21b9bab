"""How messages show the words of users and of files: short, and with every character visible."""

import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

LONGEST: Final = 300
"""Characters of the longest word that a message shows whole; a longer word is a user's slip."""

_KEPT: Final = (200, 50)
"""Characters that a message shows of a longer word: at its beginning, and at its end."""

_TOO_LONG: Final = re.compile(rf"\S{{{LONGEST + 1},}}")


def readable(message: str) -> str:
    """Return a message without invisible characters and without long words.

    Invisible characters are shown as in ``visible``. A word longer than ``LONGEST`` loses its
    middle.

    Args:
        message: the message, of any number of lines.
    """
    beginning, end = _KEPT
    return _TOO_LONG.sub(lambda word: f"{word[0][:beginning]}...{word[0][-end:]}", visible(message))


def visible(text: str) -> str:
    r"""Return a text of any number of lines without invisible characters, and otherwise whole.

    Each character that cannot be printed is shown as its number, such as ``\u200b``. Examples are a
    space without width, a mark that turns the direction of writing, or half a character.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else _number(c) for c in text)


def nearest(word: str, known: Collection[str]) -> str:
    """Return the question whether the most similar known word is meant; empty if there is none."""
    from difflib import get_close_matches  # imported here, so that right command lines start sooner

    alike = {own.lower(): own for own in known}
    near = get_close_matches(word.lower(), alike, n=1)
    return f"did you mean {alike[near[0]]}? " if near else ""


def plain_number(number: float) -> int | float:
    """Return the word of a number: a whole number has no ".0" behind it.

    Numbers that Python writes with an exponent stay as they are.
    """
    return int(number) if float(number).is_integer() and abs(number) < 1e16 else number


def as_error(message: object) -> str:
    """Return the text that ends a command; if there are several mistakes, each has a line."""
    told = readable(str(message))
    return f"error:{chr(10) if chr(10) in told else ' '}{told}"


@contextmanager
def told_as_error(*kinds: type[Exception]) -> Iterator[None]:
    """Let errors of some kinds end the process with their text instead of a traceback.

    Raises:
        SystemExit: an error of these kinds was raised within the ``with`` block.
    """
    try:
        yield
    except kinds as error:
        sys.exit(as_error(error))


def _number(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
