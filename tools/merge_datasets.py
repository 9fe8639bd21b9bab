#!/usr/bin/env python3
r"""Merge token files (.bin and .idx) into one pair, as Megatron-LM's tool of this name does.

    python tools/merge_datasets.py --input FOLDER --output-prefix merged
    python tools/merge_datasets.py --input part1_text_document part2_text_document \
      --output-prefix merged

Of a folder all pairs are merged, sorted by name; of prefixes those, in the order given.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.data.preparation.index_merge import merge, prefixes_of


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", type=Path, required=True, metavar="FOLDER | PREFIX")
    parser.add_argument("--output-prefix", type=Path, required=True, help="of the pair written")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Merge.

    Returns:
        The exit status: 2 for a user's mistake, which is printed in one line, 130 when interrupted.
    """
    given = parse(argv)
    try:
        folder = given.input[0] if len(given.input) == 1 and given.input[0].is_dir() else None
        prefixes = prefixes_of(folder) if folder else given.input
        sequences, tokens = merge(prefixes, given.output_prefix)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was kept", file=sys.stderr)
        return 130
    print(f"{len(prefixes)} pairs, {sequences:,} sequences, {tokens:,} tokens", file=sys.stderr)
    print(f"DATA_PATH={given.output_prefix}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
