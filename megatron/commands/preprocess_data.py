r"""Turn text into token files for training: JSON lines or parquet into Megatron-LM's .bin and .idx.

    preprocess-data --input a.jsonl.zst b.parquet --output-prefix corpus \
      --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model --append-eod

writes corpus_text_document.bin and .idx, and prints the line DATA_PATH=corpus_text_document. A run
that is ended goes on where it was when the same command is given again, and writes the same bytes.
docs/data.md tells more.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.commands.environment import in_environment

with in_environment():
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from megatron.data.preparation.encode import EncodeConfig
    from megatron.data.preparation.preprocess import PreprocessConfig, Status, preprocess
    from megatron.data.preparation.sentences import SentenceConfig
    from megatron.data.tokenizers.settings import TYPES, TokenizerSettings
    from megatron.flags.command import read
    from megatron.flags.declare import flag, required
    from megatron.flags.groups import Flags, declarations
    from megatron.flags.ranges import COUNT, INTERVAL
    from megatron.flags.readable import as_error
    from megatron.schedules.counted import counted, were

_SECONDS = 10.0  # between two lines of progress, if stderr is not a terminal


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class DataFlags:
    """Data."""

    input: tuple[Path, ...] = required(
        "JSON lines (plain, gzip or zstandard) or parquet, read in this order.",
        metavar="FILE ...")
    output_prefix: Path = required("Of the files written.")
    json_keys: tuple[str, ...] = flag(("text",), "What is read of a record.", metavar="KEY ...")
    append_eod: bool = flag(False, "End every document with its token.")
    split_sentences: bool = flag(False, "Make sequences of sentences.")
    keep_newlines: bool = flag(False, "Keep what is between sentences.", needs="--split-sentences",
        lack="changes nothing without --split-sentences")
    lang: str = flag("english", "Of the sentences.")


@dataclass(frozen=True)
class RunFlags:
    """Run."""

    workers: int = flag(os.cpu_count() or 1, "Processes.", COUNT, unset="one per core")
    strict: bool = flag(False, "End at the first bad line.")
    restart: bool = flag(False, "Do not go on where a run was ended.")


@dataclass(frozen=True)
class IdleFlags:
    """Of Megatron-LM's tool, accepted with a note."""

    partitions: int | None = flag(None,
        "Changes nothing: one run uses all cores, and writes one pair.", COUNT, unset="none")
    keep_sequential_samples: bool = flag(False,
        "Changes nothing: the order of the input always holds.")
    log_interval: int | None = flag(None, "Changes nothing: progress is told by time.", INTERVAL,
        unset="none")


@dataclass(frozen=True)
class TextFlags(TokenizerSettings):
    """Tokenizer."""

    tokenizer_type: str = required("Megatron's name of it.", choices=TYPES)
# fmt: on


class Reporter:
    """Progress on stderr, with the rate and the time left: a bar on a terminal, else lines."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%  {task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._begin = self._told = time.monotonic()
        self._first: Status | None = None

    def __enter__(self) -> "Reporter":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, status: Status) -> None:
        """Show the status after a block; the first call gives the status at the start."""
        if self._first is None:
            self._first = status
            if status.done_bytes or status.documents:
                self._console.print(f"going on after {_documents(status)}")
        now = time.monotonic()
        seconds = max(now - self._begin, 1e-9)
        rate = (status.done_bytes - self._first.done_bytes) / seconds
        words = (
            f"{_documents(status)}, {counted(status.tokens, 'token', grouped=True)}, "
            f"{counted(status.bad, 'line', grouped=True)} refused, "
            f"{rate / 1e6:.2f} MB/s"
        )
        self._bar.update(
            self._task, description=words, completed=status.done_bytes, total=status.total_bytes
        )
        if not self._console.is_terminal and now - self._told >= _SECONDS:
            self._told = now
            rest = max(0, status.total_bytes - status.done_bytes)
            left = f", {rest / rate:.0f} s left" if rate > 0 else ""
            share = status.done_bytes / max(1, status.total_bytes)
            self._console.print(f"{share:.0%}  {words}{left}")


def _documents(status: Status) -> str:
    return counted(status.documents, "document", grouped=True)


def config_of(flags: Flags) -> PreprocessConfig:
    """Return the configuration that the flags describe.

    Raises:
        ValueError: flags contradict one another, or a number is out of range.
    """
    data, run, tokenizer = flags[DataFlags], flags[RunFlags], flags[TextFlags]
    sentences = SentenceConfig(data.lang, data.keep_newlines) if data.split_sentences else None
    return PreprocessConfig(
        data.input,
        data.output_prefix,
        EncodeConfig(tokenizer, data.json_keys, data.append_eod, sentences),
        run.workers,
        run.strict,
        run.restart,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, and print their names and sizes.

    Returns:
        The exit status: 2 for a user's mistake, which is printed in one line, 130 when interrupted.
    """
    flags = read(arguments, __doc__, DataFlags, RunFlags, IdleFlags, TextFlags)
    for idle in declarations(IdleFlags):
        if getattr(flags[IdleFlags], idle.name):
            why = idle.facts.help[:1].lower() + idle.facts.help[1:]
            print(f"note: {idle.option} {why}", file=sys.stderr)
    try:
        config = config_of(flags)
        with Reporter() as report:
            status = preprocess(config, report)
    except ValueError as error:
        print(as_error(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this one was", file=sys.stderr)
        return 130
    if status.bad:
        told = f"{counted(status.bad, 'line', grouped=True)} {were(status.bad)} left out"
        print(f"note: {told}; the first of them:", file=sys.stderr)
        print(*(f"  {line}" for line in status.told), sep="\n", file=sys.stderr)
    print(f"{_documents(status)}, {counted(status.tokens, 'token', grouped=True)}", file=sys.stderr)
    for prefix in config.prefixes.values():
        print(f"DATA_PATH={prefix}")
    return 0
