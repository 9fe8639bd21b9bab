#!/usr/bin/env python3
"""Explore schedules on a page: plans, memory, comparisons, recorded runs, and plans edited by hand.

python tools/explore.py                      # serves the page on this machine
python tools/explore.py --export site/       # writes it for any file host: no server of ours behind

The exported page runs the same Python in the browser, by Pyodide, which npm fetches; see
docs/explorer.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.arguments import Parser, number
from tools.explorer.export import export
from tools.explorer.server import make_server


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    port = "of 127.0.0.1 (default: %(default)s; 0: any that is free)"
    add("--port", type=number(0), default=8017, metavar="PORT", help=port)
    add("--export", type=Path, metavar="FOLDER", help="write the page there instead")
    pyodide = "an unpacked npm package 'pyodide', for --export (default: npm fetches it)"
    add("--pyodide", type=Path, metavar="FOLDER", help=pyodide)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; an error ends the process with one line."""
    options = _parse_arguments(argv)
    try:
        if options.pyodide is not None and options.export is None:
            raise ValueError(f"--pyodide {options.pyodide} is for --export FOLDER: add it")
        if options.export is not None:
            export(options.export, options.pyodide)
            print(f"wrote {options.export}: put it on any file host, as it is")
            return
        server = make_server(int(options.port))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
