"""Words of users and of files, as messages show them: short, and without anything invisible."""

import re
from typing import Final

LONGEST: Final = 300
"""Characters of the longest word that a message shows whole; longer ones are digits gone astray."""

_KEPT: Final = (200, 50)
"""Characters that stay of a longer word: so many of its beginning, and of its end."""

_TOO_LONG: Final = re.compile(rf"\S{{{LONGEST + 1},}}")


def readable(message: str) -> str:
    r"""Return a message that shows all that is in it, and whose words are not long.

    A space of no width, a mark that turns the direction of writing, or half a character stands as
    its number, such as ``\u200b``. A word longer than ``LONGEST`` loses its middle.

    Args:
        message: of any number of lines.
    """
    beginning, end = _KEPT
    shown = "".join(c if c.isprintable() or c in "\n\t" else _number(c) for c in message)
    return _TOO_LONG.sub(lambda word: f"{word[0][:beginning]}...{word[0][-end:]}", shown)


def _number(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
