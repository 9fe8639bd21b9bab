#!/usr/bin/env python3
r"""Turn text into token files for training: JSON lines or parquet into Megatron-LM's .bin and .idx.

    python tools/preprocess_data.py --input a.jsonl.zst b.parquet --output-prefix corpus \
      --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model --append-eod

writes corpus_text_document.bin and .idx, and prints the line DATA_PATH=corpus_text_document. A run
that is ended goes on where it was when the same command is given again, and writes the same bytes.
docs/data.md tells more.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from megatron.commands.tokenizer_options import add_tokenizer_options, tokenizer_of
    from megatron.data.preparation.encode import EncodeConfig
    from megatron.data.preparation.preprocess import PreprocessConfig, Status, preprocess
    from megatron.data.preparation.sentences import SentenceConfig

IDLE = {
    "--partitions": "changes nothing: one run uses all cores, and writes one pair",
    "--keep-sequential-samples": "changes nothing: the order of the input always holds",
    "--log-interval": "changes nothing: progress is told by time",
}
"""Flags of Megatron-LM's tool that this one does not need, and why."""

_SECONDS = 10.0  # between two lines of progress where there is no terminal


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, status: Status) -> None:
        """Take the status after a block; the first one is that of the beginning."""
        if self._first is None:
            self._first = status
            if status.done_bytes or status.documents:
                self._console.print(f"going on after {status.documents:,} documents")
        now = time.monotonic()
        seconds = max(now - self._begin, 1e-9)
        rate = (status.done_bytes - self._first.done_bytes) / seconds
        words = (
            f"{status.documents:,} documents, {status.tokens:,} tokens, {status.bad:,} bad lines, "
            f"{rate / 1e6:.2f} MB/s"
        )
        self._bar.update(
            self._task, description=words, completed=status.done_bytes, total=status.total_bytes
        )
        if not self._console.is_terminal and now - self._told >= _SECONDS:
            self._told = now
            left = (status.total_bytes - status.done_bytes) / rate if rate else float("inf")
            share = status.done_bytes / max(1, status.total_bytes)
            self._console.print(f"{share:.0%}  {words}, {left:.0f} s left")


def parser() -> argparse.ArgumentParser:
    """The command line: Megatron-LM's names, and the tokenizer's flags of training."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = made.add_argument_group("data")
    data.add_argument(
        "--input",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines (plain, gzip or zstandard) or parquet, read in this order",
    )
    data.add_argument("--output-prefix", type=Path, required=True, help="of the files written")
    data.add_argument("--json-keys", nargs="+", default=["text"], help="what is read of a record")
    data.add_argument("--append-eod", action="store_true", help="end every document with its token")
    data.add_argument("--split-sentences", action="store_true", help="make sequences of sentences")
    data.add_argument("--keep-newlines", action="store_true", help="keep what is between sentences")
    data.add_argument("--lang", default="english", help="of the sentences (default: english)")
    work = made.add_argument_group("run")
    work.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)"
    )
    work.add_argument("--strict", action="store_true", help="end at the first bad line")
    work.add_argument("--restart", action="store_true", help="do not go on where a run was ended")
    idle = made.add_argument_group("of Megatron-LM's tool, accepted with a note")
    for option, why in IDLE.items():
        idle.add_argument(option, nargs="?", const="given", help=why)
    tokenizer = made.add_argument_group("tokenizer")
    add_tokenizer_options(tokenizer, required=True)
    return made


def config_of(given: argparse.Namespace) -> PreprocessConfig:
    """What the command line asks for.

    Raises:
        ValueError: flags do not go together, or a number is out of range.
    """
    tokenizer = tokenizer_of(given)
    assert tokenizer is not None, "the type is required"
    if given.keep_newlines and not given.split_sentences:
        raise ValueError("--keep-newlines changes nothing without --split-sentences: leave it out")
    sentences = SentenceConfig(given.lang, given.keep_newlines) if given.split_sentences else None
    return PreprocessConfig(
        tuple(given.input),
        given.output_prefix,
        EncodeConfig(tokenizer, tuple(given.json_keys), given.append_eod, sentences),
        given.workers,
        given.strict,
        given.restart,
    )


def main(argv: Sequence[str]) -> int:
    """Write the files, and print what they are.

    Returns:
        The exit status: 2 for a user's mistake, which is printed in one line, 130 when interrupted.
    """
    given = parser().parse_args(argv)
    for option, why in IDLE.items():
        if getattr(given, option[2:].replace("-", "_")):
            print(f"note: {option} {why}", file=sys.stderr)
    try:
        config = config_of(given)
        with Reporter() as report:
            status = preprocess(config, report)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this one was", file=sys.stderr)
        return 130
    if status.bad:
        print(f"note: {status.bad:,} lines were left out; the first of them:", file=sys.stderr)
        print(*(f"  {line}" for line in status.told), sep="\n", file=sys.stderr)
    print(f"{status.documents:,} documents, {status.tokens:,} tokens", file=sys.stderr)
    for prefix in config.prefixes.values():
        print(f"DATA_PATH={prefix}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
