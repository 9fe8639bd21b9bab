"""Judges the command line of a training job before the job starts, in one process.

``pretrain_gpt.sh`` calls it with the flags of ``pretrain_gpt.py``, and with ``WORLD_SIZE`` set to
the ranks of the job. With ``ONLY_WORDS`` set, only flag files and the names of flags are judged,
because other mistakes depend on flags that the script adds later. Mistakes are printed, and the
exit status is then 2. Mistakes about the files of data are left to the ranks.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.flags.readable import as_error
    from megatron.run.command_line import read
    from megatron.run.flag_files import read_flag_files
    from megatron.run.topics import DECLARED
    from megatron.run.words import sort_words

_FILES = ("--data-path ", "--tokenizer-model ")
_UNKNOWN = " is no flag"


def mistakes(argv: Sequence[str], world_size: int) -> list[str]:
    """Return a line on each mistake of a command line, but for the files of data.

    Raises:
        SystemExit: with 0 after ``--help``.
    """
    return [line for line in read(argv, world_size).mistakes if not line.startswith(_FILES)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the mistakes; return 2 if there are any."""
    words, ranks = sys.argv[1:] if argv is None else argv, os.environ.get("WORLD_SIZE") or "1"
    helps = not {"-h", "--help"}.isdisjoint(words)
    if os.environ.get("ONLY_WORDS") and not helps:
        unknown = [line for line in sort_words(words, DECLARED).mistakes if _UNKNOWN in line]
        found = list(dict.fromkeys([*read_flag_files(words).mistakes, *unknown]))
    else:
        found = mistakes(words, int(ranks))
    if found:
        print(as_error("\n".join(found)), file=sys.stderr)
    return 2 if found else 0


if __name__ == "__main__":
    sys.exit(main())
