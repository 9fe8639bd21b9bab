"""Flag files: a word ``@FILE`` of a command line stands for the flags that the file lists.

    # Llama 3 8B: a comment
    --num-layers 32
    --window-size 4096,0   # one flag with its values a line
    --data-path "my corpus/text_document"
    @other.flags           # the flags of another file, found from the folder of this one

Words are quoted as in a shell, and nothing is expanded: ``$HOME`` stands for itself. A value that
begins with @ is written ``--flag=@value``. NAME is a path from the current folder; where no such
file is, it is the name of a recipe that is installed (``megatron/recipes``), with or without
``recipes/`` before it and ``.flags`` behind it.

This module needs the standard library alone, so that ``pretrain_gpt.sh`` can call it before
anything is installed: it prints the words of its command line without flag files, quoted.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatron.flags.readable import as_error, nearest
from megatron.flags.words import spelling
from megatron.native.files import FileKindError, read_bytes

RECIPES: Final = Path(__file__).resolve().parents[1] / "recipes"
"""The folder of the recipes that are installed with this package."""

SUFFIX: Final = ".flags"

MOST_BYTES: Final = 1 << 20
"""Bytes of the largest flag file."""

MOST_FILES: Final = 64
"""Files that the words of one command line may name, directly and through other files."""

MOST_DEEP: Final = 8
"""Files that may lead to a file, one naming the next."""


@dataclass(frozen=True)
class WrittenFlag:
    """A flag with its words, as written.

    Attributes:
        option: the flag with hyphens; empty: words before any flag.
        values: its values.
        words: the words as they stand on the command line or in the file.
        file: the flag file, as it is named behind the @; empty: the command line.
        line: its line in the file, from 1.
    """

    option: str
    values: tuple[str, ...]
    words: tuple[str, ...]
    file: str = ""
    line: int = 0

    @property
    def origin(self) -> str:
        """The file and the line, for a message; empty: the command line."""
        return f"{self.file}, line {self.line}" if self.file else ""

    @property
    def shown(self) -> str:
        """The flag for a message, with its origin."""
        told = " ".join([self.option, *self.values])
        return f"{told} ({self.origin})" if self.origin else told


@dataclass
class FlagsRead:
    """The flags of a command line, those of its flag files among them.

    Attributes:
        flags: all flags in the order in which they stand.
        notes: a sentence on each flag file of the command line.
        mistakes: a line on each mistake in a flag file.
    """

    flags: list[WrittenFlag] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    _files: int = 0

    @property
    def words(self) -> list[str]:
        """The words of a command line with the same flags and no flag file."""
        return [word for flag in self.flags for word in flag.words]

    def take_file(self, name: str, folder: Path, within: tuple[Path, ...] = ()) -> None:
        """Add the flags of a file.

        Args:
            name: the file as it is named behind the @.
            folder: the folder from which the name is a path.
            within: the files that lead to it.
        """
        self._files += 1
        if self._files > MOST_FILES:
            if self._files == MOST_FILES + 1:
                self.mistakes.append(
                    f"@{name} is flag file {self._files}: name {MOST_FILES} at most"
                )
            return
        path = found_file(name, folder)
        fault = _fault_of(path, within) if path is not None else _unknown(name)
        if path is None or fault:
            self.mistakes.append(f"@{name}{_named_in(within)} {fault}")
            return
        try:
            lines = _lines(path)
        except ValueError as error:
            self.mistakes.append(f"@{name}{_named_in(within)} {error}")
            return
        before = len(self.flags)
        for number, line in enumerate(lines, 1):
            self._take_line(line, name, number, (*within, path))
        if not within:
            count = len(self.flags) - before
            self.notes.append(f"@{name} is read as {count} flag{'s' * (count != 1)} of {path}")

    def _take_line(self, line: str, name: str, number: int, within: tuple[Path, ...]) -> None:
        """Add the flag of a line, or the flags of the file that it names."""
        origin = f"{name}, line {number}"
        try:
            words = shlex.split(without_comment(line))
        except ValueError as error:
            self.mistakes.append(f"{origin}: {str(error).lower()}: quote it as for a shell")
            return
        if not words:
            return
        if fault := _fault_of_words(words):
            self.mistakes.append(f"{origin}: {fault}")
        elif words[0].startswith("@"):
            self.take_file(words[0][1:], within[-1].parent, within)
        else:
            self.flags.append(_written(words, name, number))


def read_flag_files(argv: Sequence[str]) -> FlagsRead:
    """Return the flags of a command line, in which files stand for their flags.

    Args:
        argv: words of the command line, without the program.
    """
    found, typed, last_file = FlagsRead(), list[str](), ""
    for word in [*argv, None]:
        begins = word is None or word.startswith(("--", "@"))
        if typed and begins:
            found.flags.append(_written(typed))
            typed = []
        if word is None:
            break
        if word.startswith("@"):
            last_file = word
            found.take_file(word[1:], Path())
        elif last_file and not begins and not typed:
            found.mistakes.append(
                f"{word!r} stands behind {last_file}, which takes no value: leave it out, or write "
                "its flag first"
            )
        else:
            typed.append(word)
    return found


def _written(words: Sequence[str], file: str = "", line: int = 0) -> WrittenFlag:
    """Return the flag that some words begin with, or words of no flag."""
    if not words[0].startswith("--"):
        return WrittenFlag("", tuple(words), tuple(words), file, line)
    begun, equals, value = words[0].partition("=")
    values = (*[value] * bool(equals), *words[1:])
    return WrittenFlag(spelling(begun), values, tuple(words), file, line)


def found_file(name: str, folder: Path) -> Path | None:
    """Return the file of a name: a path from a folder, or else the recipe of that name.

    A folder does not hide a recipe, because a model's folder often has the model's name.
    """
    path, recipe = folder / name, name.removeprefix("recipes/").removesuffix(SUFFIX)
    is_recipe = recipe in recipe_names()
    try:
        is_there = bool(name) and path.exists()
    except PermissionError:  # whoever reads the file tells it
        is_there = True
    except OSError:  # such as a name that is too long for any file
        is_there = False
    if is_there and not (is_recipe and path.is_dir()):
        return path
    return RECIPES / f"{recipe}{SUFFIX}" if is_recipe else None


def recipe_names() -> list[str]:
    """Return the names of the recipes that are installed."""
    return sorted(path.name.removesuffix(SUFFIX) for path in RECIPES.glob(f"*{SUFFIX}"))


def without_comment(line: str) -> str:
    """Return a line up to a # that begins a word, as a shell reads it."""
    quote, begins, at = "", True, 0
    while at < len(line):
        character = line[at]
        if character == "\\" and quote != "'":
            at += 1  # the next character stands for itself
        elif quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#" and begins:
            return line[:at]
        begins = not quote and character.isspace()
        at += 1
    return line


def _lines(path: Path) -> list[str]:
    """Return the lines of a flag file.

    Raises:
        ValueError: the file cannot be read; the message is to follow its name.
    """
    try:
        text = read_bytes(path, MOST_BYTES).decode("utf-8-sig")
    except FileKindError as error:
        raise ValueError(f"{error.fault}: give a text file with a flag a line") from error
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}): give a text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is no text (byte {error.start + 1}): give a text file") from error
    if "\0" in text:
        raise ValueError("is no text (there are zeros in it): give a text file")
    return text.replace("\r\n", "\n").split("\n")


def _fault_of(path: Path, within: tuple[Path, ...]) -> str:
    """Return the reason why a file is not read within others; empty: the file is read."""
    if path.resolve() in {other.resolve() for other in within}:
        return "names itself, directly or through other files: leave one of the names out"
    if len(within) >= MOST_DEEP:
        return f"is more than {MOST_DEEP} files deep: name it in a file further up"
    return ""


def _fault_of_words(words: Sequence[str]) -> str:
    """Return the fault of a line of a flag file; empty: there is none."""
    first, *others = words
    if first.startswith("@"):
        return f"{others[0]!r} stands behind {first}: give it a line of its own" if others else ""
    if not first.startswith("--"):
        return f"{first!r} is no flag: a line is --flag VALUE, @FILE or # comment"
    for word in others:
        if word.startswith("--"):
            return f"{word} stands behind {first}: give each flag a line of its own"
        if word.startswith("@"):
            return f"{word} stands behind {first}: write {first}={word}, or @FILE on a line alone"
    return ""


def _named_in(within: tuple[Path, ...]) -> str:
    return f" (named in {within[-1]})" if within else ""


def _unknown(name: str) -> str:
    if not name:
        return "names no file: write @FILE"
    names = recipe_names()
    similar = nearest(name.removeprefix("recipes/").removesuffix(SUFFIX), names)
    listed = ", ".join(names) or "none"
    return (
        f"is no file, and no recipe has this name: {similar}recipes are {listed} (a value that "
        f"begins with @ is written --flag=@{name})"
    )


def main(argv: Sequence[str]) -> int:
    """Print the words of a command line without flag files, quoted for a shell; 2 for mistakes."""
    found = read_flag_files(argv)
    if found.mistakes:
        print(as_error("\n".join(found.mistakes)), file=sys.stderr)
        return 2
    print(shlex.join(found.words))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
