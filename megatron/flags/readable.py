"""How messages show the words of users and of files: short, and with every character visible."""

import re
from typing import Final

LONGEST: Final = 300
"""Characters of the longest word that a message shows whole; a longer word is a user's slip."""

_KEPT: Final = (200, 50)
"""Characters that a message shows of a longer word: at its beginning, and at its end."""

_TOO_LONG: Final = re.compile(rf"\S{{{LONGEST + 1},}}")


def readable(message: str) -> str:
    r"""Return a message without invisible characters and without long words.

    Each character that cannot be printed is shown as its number, such as ``\u200b``. Examples are a
    space without width, a mark that turns the direction of writing, or half a character. A word
    longer than ``LONGEST`` loses its middle.

    Args:
        message: the message, of any number of lines.
    """
    beginning, end = _KEPT
    shown = "".join(c if c.isprintable() or c in "\n\t" else _number(c) for c in message)
    return _TOO_LONG.sub(lambda word: f"{word[0][:beginning]}...{word[0][-end:]}", shown)


def _number(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
