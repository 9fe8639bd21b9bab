"""Explore schedules on a page: plans, memory, comparisons, recorded runs, and plans edited by hand.

explore-schedules                      # serves the page on this machine
explore-schedules --candidates ways/   # shows what plan-pretraining --explore ways/ wrote, too
explore-schedules --export site/       # writes it for any file host: no server of ours behind

The exported page runs the same Python in the browser, by Pyodide, which npm fetches; see
docs/explorer.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.commands.exploring.export import export
from megatron.commands.exploring.server import make_server
from megatron.flags.command import read
from megatron.flags.declare import flag
from megatron.flags.ranges import NOT_NEGATIVE
from megatron.flags.readable import told_as_error
from megatron.simulator.ways_folder import WaysFolder


@dataclass(frozen=True)
class ExploreFlags:
    """The page."""

    port: int = flag(8017, "Of 127.0.0.1; 0: any that is free.", NOT_NEGATIVE, metavar="PORT")
    candidates: Path | None = flag(
        None,
        "Show the ways to run a job that plan-pretraining --explore FOLDER wrote, as points of "
        "time against memory, each with its timeline.",
        metavar="FOLDER", unset="none", excludes="--export",
    )  # fmt: skip
    export: Path | None = flag(None, "Write the page into this folder instead.", unset="none")
    pyodide: Path | None = flag(
        None, "An unpacked npm package 'pyodide'.", unset="npm fetches it", needs="--export"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; an error ends the process with one line."""
    options = read(argv, __doc__, ExploreFlags)[ExploreFlags]
    with told_as_error(OSError, ValueError):
        if options.export is not None:
            export(options.export, options.pyodide)
            print(f"wrote {options.export}: put it on any file host, as it is")
            return
        server = make_server(options.port, _ways(options.candidates))
    print(f"http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


def _ways(folder: Path | None) -> WaysFolder | None:
    """Return the ways in a folder.

    Raises:
        ValueError: it holds none; the message names the flag, the file and the way out.
    """
    try:
        return None if folder is None else WaysFolder.read(folder)
    except ValueError as error:
        raise ValueError(f"--candidates {folder}: {error}") from error


if __name__ == "__main__":
    main()
