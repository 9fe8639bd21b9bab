#!/usr/bin/env python3
r"""Merge token files (.bin and .idx) into one pair, as Megatron-LM's tool of this name does.

    python tools/merge_datasets.py --input FOLDER --output-prefix merged
    python tools/merge_datasets.py --input part1_text_document part2_text_document \
      --output-prefix merged

Of a folder all pairs are merged, sorted by name; of prefixes those, in the order given.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.data.preparation.index_merge import merge, prefixes_of
    from megatron.flags.command import read
    from megatron.flags.declare import required
    from megatron.flags.readable import as_error
    from megatron.schedules.counted import counted


@dataclass(frozen=True)
class MergeFlags:
    """Files."""

    input: tuple[Path, ...] = required("A folder, or prefixes of pairs.", metavar="PATH ...")
    output_prefix: Path = required("Of the pair written.")


def main(argv: Sequence[str]) -> int:
    """Merge the files.

    Returns:
        The exit status: 2 for a user's mistake, which is printed in one line, 130 when interrupted.
    """
    given = read(argv, __doc__, MergeFlags)[MergeFlags]
    try:
        folder = given.input[0] if len(given.input) == 1 and given.input[0].is_dir() else None
        prefixes = prefixes_of(folder) if folder else given.input
        sequences, tokens = merge(prefixes, given.output_prefix)
    except (ValueError, OSError) as error:
        print(as_error(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was kept", file=sys.stderr)
        return 130
    numbers = {"pair": len(prefixes), "sequence": sequences, "token": tokens}
    told = (counted(number, noun, grouped=True) for noun, number in numbers.items())
    print(", ".join(told), file=sys.stderr)
    print(f"DATA_PATH={given.output_prefix}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
