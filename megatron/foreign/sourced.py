"""Files that a script reads by ``source FILE`` or ``. FILE``: where they are, and their texts.

A shell looks for them from the folder in which it runs, which a reader does not know. So the
folder of the script comes first, then the folder of the file with the command, then the folder in
which this program runs. Usual ways to write the folder of the script are understood.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from megatron.foreign.faults import LARGEST_FILE
from megatron.foreign.values import Hole, Holes
from megatron.native.files import FileKindError, read_bytes

SHELL_ENDS: Final = (".sh", ".bash", ".env", ".conf", ".cfg")
"""Ends of names of files whose text is for a shell."""

_SELF: Final = r"\$(?:0|\{0\}|BASH_SOURCE|\{BASH_SOURCE(?:\[0\]|\[@\])?(?::-\$\{?0\}?)?\})"
_FILE: Final = rf"(?:{_SELF}|\$\((?:readlink -f|realpath)(?: --)? {_SELF}\))"
_DIR: Final = rf"\$\(dirname(?: --)? {_FILE}\)"
_QUIET: Final = r"(?: ?&?> ?/dev/null)?(?: ?2>&1)?"
_HERE: Final = re.compile(
    rf"{_SELF}|{_DIR}|\$\((?:readlink -f|realpath)(?: --)? {_DIR}\)"
    rf"|\$\(cd(?: -P)?(?: --)? {_DIR}{_QUIET} ?(?:&&|;) ?pwd(?: -P)?\)"
)
"""The folder of a script, as scripts write it, without quotes; of ``${0%/*}`` the reader's hole has
only the variable."""

_WORKING: Final = re.compile(r"\$PWD|\$\{PWD\}|\$\(pwd(?: -P)?\)|`pwd`")


class Sources:
    """The files that a script reads.

    Args:
        script: path of the script; ``None``: its text alone is known, and no file is read.
    """

    def __init__(self, script: Path | None = None) -> None:
        self._open = [] if script is None else [script]

    @property
    def reading(self) -> Path | None:
        """The file that is being read; ``None``: the script itself."""
        return self._open[-1] if len(self._open) > 1 else None

    def find(self, name: str, holes: Holes) -> Path | None:
        """Return the file that a name stands for; ``None``: there is none, or it is not known.

        Args:
            name: with holes.
            holes: the holes.
        """
        known = self._known(name, holes) if self._open else None
        if not known:
            return None
        return next((path for path in self._candidates(known) if _is_file(path)), None)

    def places(self, name: str) -> str:
        """Return the folders in which a file was looked for, in words."""
        folders = dict.fromkeys(str(path.parent) for path in self._candidates(name))
        return " and ".join(folders)

    def text(self, path: Path) -> str:
        """Return the text of a file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is being read already, or it is no text or too large.
        """
        for at, own in enumerate(self._open):
            if own.samefile(path):
                way = " > ".join(str(one) for one in (*self._open[at:], path))
                raise CycleError(f"{path} reads itself ({way}): remove one of these lines")
        return text_of(path)

    def enter(self, path: Path) -> None:
        """Note that a file is read from now on, until ``leave``."""
        self._open.append(path)

    def leave(self) -> None:
        """End the file that was entered last."""
        self._open.pop()

    def _known(self, name: str, holes: Holes) -> str | None:
        """Return a name whose holes stand for the folder of the script; ``None``: others do not."""
        known = ""
        for part in holes.split(name):
            if isinstance(part, str):
                own: str | None = part
            elif part.assigned:
                own = self._known(part.assigned, holes)
            else:
                own = self._folder(part)
            if own is None:
                return None
            known += own
        return known

    def _folder(self, hole: Hole) -> str | None:
        """Return the folder for which a hole stands, if it is a usual way to write it."""
        written = " ".join(re.sub("[\"']", "", hole.text).split())
        written = written.replace("( ", "(").replace(" )", ")")
        if _WORKING.fullmatch(written):
            return "."
        if not _HERE.fullmatch(written):
            return None
        own = self._open[-1] if "BASH_SOURCE" in written else self._open[0]
        return str(own.parent.absolute())

    def _candidates(self, name: str) -> Iterator[Path]:
        if not self._open:
            return
        for folder in dict.fromkeys((self._open[0].parent, self._open[-1].parent, Path())):
            yield folder / name


class CycleError(ValueError):
    """A file reads itself."""


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long, or has a zero byte
        return False


def text_of(path: Path) -> str:
    """Return the text of a file, with line ends of Unix.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no text, or too large.
    """
    try:
        content = read_bytes(path, LARGEST_FILE)
    except FileKindError as error:
        raise ValueError(
            f"{path} {error.fault}: give a launch script or a configuration"
        ) from error
    if b"\0" in content:
        raise ValueError(f"{path} is no text: there are zero bytes in it; give a launch script")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")  # comments may be in any encoding
    return text.replace("\r\n", "\n")
