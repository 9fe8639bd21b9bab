"""Makes tokenised text and a tokenizer to train on, from what lies on this machine.

Without ``--text`` the text is the standard library of the running Python. The last two lines of
the output name the results, for a shell to read:

    DATA_PATH=<folder>/text_document
    TOKENIZER_MODEL=<folder>/tokenizer.model

A second call finds them made. Documents end with the token ``</s>``.
"""

import os
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    from megatron.data.corpus import standard_library, text_files
    from megatron.data.prepare import prepare, unused_pieces
    from megatron.flags.command import read
    from megatron.flags.declare import flag, required
    from megatron.flags.readable import as_error
    from megatron.native.files import cache_root

TELL_EVERY = 8.0
"""Seconds after which a stage that prints nothing says how long it has run."""

_SMALLEST, _LARGEST = 261, 1_000_000  # bytes and special tokens alone are 260 entries


def parse_vocab_size(text: str) -> int:
    """Reads a size such as ``32k`` or ``32000``.

    Raises:
        ValueError: the text is not a size, or the size is out of range.
    """
    found = re.fullmatch(r"([1-9]\d*)(k?)", text.lower(), re.ASCII)
    size = int(found[1]) * (1000 if found[2] else 1) if found else 0
    if not _SMALLEST <= size <= _LARGEST:
        raise ValueError(
            f"give a number of entries from {_SMALLEST} to "
            f"{_LARGEST // 1000}k, for example 8k (8000); the paper has 32k, 64k, 128k and 256k; "
            "pretrain_gpt.sh gives VOCAB_SIZE"
        )
    return size


class Reporter:
    """Shows progress on stderr: bars on a terminal, else lines.

    There is a line for every tenth of a stage, and one whenever ``tell_every`` seconds have passed
    without any.
    """

    def __init__(self, tell_every: float = TELL_EVERY) -> None:
        self._tell_every = tell_every
        self._ended, self._spoke = threading.Event(), threading.Event()
        self._teller = threading.Thread(target=self._tell, daemon=True)
        self._stage, self._begin = "", monotonic()
        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}

    def __enter__(self) -> "Reporter":
        self._bars.start()
        if not self._console.is_terminal:
            self._teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._spoke.set()
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Shows a report of progress; see `megatron.data.prepare.Progress`."""
        if self._console.is_terminal:
            self._show(stage, done, total)
        else:
            self._print(stage, done, total)

    def _show(self, stage: str, done: int, total: int | None) -> None:
        if stage not in self._tasks:
            for task in self._bars.tasks:  # the stage before has ended
                self._bars.update(task.id, total=task.total or 1, completed=task.total or 1)
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)

    def _print(self, stage: str, done: int, total: int | None) -> None:
        tenth = 10 * done // total if total else 0
        if stage != self._stage:
            self._stage, self._begin = stage, monotonic()
        if self._tenths.get(stage) != tenth:
            self._tenths[stage] = tenth
            self._spoke.set()
            self._console.print(f"{stage}: {10 * tenth} %" if total else stage)

    def _tell(self) -> None:
        """Say how long the stage has run, whenever nothing was printed for a while."""
        while not self._ended.is_set():
            self._spoke.clear()
            if not self._spoke.wait(self._tell_every) and self._stage:
                seconds = monotonic() - self._begin
                self._console.print(f"{self._stage}: {seconds:.0f} s so far")


@dataclass(frozen=True)
class SampleFlags:
    """Data."""

    vocab_size: int = required(
        "Entries, for example 8k or 256k.", metavar="SIZE", reads=parse_vocab_size
    )
    text: tuple[Path, ...] = flag(
        (), "Your own text files (UTF-8).", metavar="FILE ...", unset="the standard library"
    )
    cache: Path | None = flag(
        None,
        "Where results are kept.",
        unset="$MEGATRON_CACHE, else megatron-vocab-parallel in $XDG_CACHE_HOME or ~/.cache",
    )


def main(argv: Sequence[str]) -> int:
    """Makes the data and prints where it is.

    Returns:
        The exit status: 2 for a user's mistake, which is printed in one line, 130 when interrupted.
    """
    flags = read(argv, __doc__, SampleFlags)[SampleFlags]
    vocab_size = flags.vocab_size
    try:
        corpus = text_files(flags.text) if flags.text else standard_library()
        place = (flags.cache or cache_root()).absolute()
        other = "--cache FOLDER, or MEGATRON_CACHE, names another place"
        print(f"tokenizer and token files are kept in {place}; {other}", file=sys.stderr)
        with Reporter() as report:
            folder = prepare(corpus, vocab_size, place, report, os.cpu_count() or 1)
    except (ValueError, OSError) as error:
        print(as_error(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was kept, the next call starts anew", file=sys.stderr)
        return 130
    if unused := unused_pieces(folder / "tokenizer.model"):
        print(
            f"note: {unused} of the {vocab_size} entries stand for nothing, as the text has too "
            f"few different words: VOCAB_SIZE / --vocab-size {vocab_size - unused} holds the "
            "others, and more text would use more",
            file=sys.stderr,
        )
    print(f"DATA_PATH={folder / 'text_document'}")
    print(f"TOKENIZER_MODEL={folder / 'tokenizer.model'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
