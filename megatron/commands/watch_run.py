"""Watch training runs on a page: curves, idle time, memory, restarts, and what the plan promised.

watch-run run.jsonl                          # serves the page on this machine, and follows the run
watch-run first.jsonl second.jsonl folder/   # several runs over each other
watch-run run.jsonl -o run.html              # one file to send: it needs no network
watch-run run.jsonl --plan plan.json         # beside the prediction of plan-pretraining --json

RUN is a file that pretrain_gpt.py --log-jsonl writes, or a folder that holds such files. The page
answers to this machine alone; to see it from another one: ssh -L 8018:127.0.0.1:8018 HOST.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.commands.progress import under_way
    from megatron.commands.watching.page_data import View
    from megatron.commands.watching.promise import Promise
    from megatron.commands.watching.server import make_server
    from megatron.commands.watching.sources import records_files
    from megatron.commands.watching.static_page import static_page
    from megatron.commands.watching.watched import Watched
    from megatron.flags.command import read
    from megatron.flags.declare import flag, positional
    from megatron.flags.groups import Flags
    from megatron.flags.readable import readable, told_as_error
    from megatron.native.files import write_text
    from megatron.schedules.counted import counted

PORT: Final = 8018
_LAST_PORT: Final = 65535


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text[:9]) <= _LAST_PORT:
        return int(text)
    raise ValueError(f"must be a port, 0 to {_LAST_PORT}; RUN stands before --serve")


@dataclass(frozen=True)
class WatchFlags:
    """The page."""

    runs: tuple[Path, ...] = positional(
        "Records of a run: a file of --log-jsonl, or a folder that holds such files. May be given "
        "several times.",
        "RUN", repeats=True,
    )  # fmt: skip
    serve: tuple[int, ...] | None = flag(
        None,
        "Serve the page at this port of 127.0.0.1 and follow the run; 0: any port that is free.",
        unset=f"{PORT} without --output", metavar="[PORT]", reads=_port, may_be_empty=True,
        excludes="--output",
    )  # fmt: skip
    output: Path | None = flag(
        None, "Write the page as one file of HTML instead.", unset="none", metavar="FILE",
        names=("-o",),
    )  # fmt: skip
    plan: Path | None = flag(
        None,
        "Show what a plan promises beside what is measured: the answer of plan-pretraining --json.",
        unset="none", metavar="FILE",
    )  # fmt: skip


def _one_port(flags: Flags) -> Iterator[str]:
    """Refuse several ports."""
    ports = flags[WatchFlags].serve or ()
    if len(ports) > 1:
        yield f"--serve {' '.join(map(str, ports))}: give one port"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; an error ends the process with its lines.

    Args:
        argv: words of the command line; ``None``: the words of this process.
    """
    options = read(argv, __doc__, WatchFlags, rules=(_one_port,))[WatchFlags]
    with told_as_error(OSError, ValueError):
        files = records_files(options.runs, may_come=options.output is None)
        watched = Watched(files, _promise(options.plan))
        if options.output is not None:
            _check_output(options.output, [file.path for file in files])
            _write(watched, options.output)
            return
        server = make_server((options.serve or (PORT,))[0], watched)
    watched.follow()
    print(f"http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
        watched.close()


def _check_output(output: Path, inputs: Sequence[Path]) -> None:
    """Refuse to write the page over records.

    Raises:
        ValueError: the page would take the place of a file that it shows.
    """
    if output.resolve() in {path.resolve() for path in inputs}:
        raise ValueError(f"--output {output}: this file holds the records: give another name")


def _write(watched: Watched, output: Path) -> None:
    """Write the page into a file."""
    with under_way("reading the records"):
        watched.read_all()
    values = watched.data(View())
    write_text(output, static_page(values))
    for note in values["notes"]:
        print(f"note: {readable(note)}")
    runs, records = len(values["runs"]), values["records"]
    print(
        readable(
            f"wrote {output}: {counted(runs, 'run')}, {counted(records, 'record', grouped=True)}"
        )
    )


def _promise(path: Path | None) -> Promise | None:
    """Return the plan in a file.

    Raises:
        ValueError: the file holds none; the message names the flag, the file and the way out.
    """
    try:
        return None if path is None else Promise.read(path)
    except ValueError as error:
        raise ValueError(f"--plan {path}: {error}") from error


if __name__ == "__main__":
    main()
