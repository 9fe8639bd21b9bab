#!/usr/bin/env python3
r"""Time preprocessing beside Megatron-LM's steps and beside Hugging Face's datasets + tokenizers.

    python tools/preprocess_benchmark.py --folder SCRATCH --megabytes 32 --workers 2 \
      --megatron-core FOLDER --rounds 3 --report report.md

The text is the standard library of the running Python as JSON lines, a document a file, again and
again up to the size. Two tokenizers of 32,000 entries are trained on it: a sentencepiece model, and
a byte-level BPE as a Hugging Face folder. A round times every way once, each in processes of its
own, and the ways in an order that changes from round to round. Where two ways write .bin and .idx
files, these must be the same, byte for byte.

FOLDER holds the unpacked package megatron-core; it shares the name ``megatron`` with this project,
so its way runs without this project's files on the path.
"""

import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from megatron.data.corpus import Corpus, standard_library
    from megatron.data.prepare import train_tokenizer
    from megatron.flags.command import read
    from megatron.flags.declare import flag, required
    from megatron.flags.ranges import COUNT, POSITIVE
    from tools.benchmarking import harness
    from tools.benchmarking.harness import spread
    from tools.pages.tables import table
    from tools.preprocessing.ways import ways_for

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 32000
NAMES = {
    "ours": "tools/preprocess_data.py",
    "megatron": "Megatron-LM's steps",
    "datasets": "datasets + tokenizers",
}


@dataclass
class Taken:
    """The seconds of a way in every round.

    Attributes:
        command: seconds from the start of the way's process to its end.
        work: seconds after its imports.
        processors: CPU seconds after its imports, of all its processes together.
    """

    command: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    processors: list[float] = field(default_factory=list)


def write_text(corpus: Corpus, path: Path, size: int) -> int:
    """Write documents as JSON lines up to a size, and return the number of documents."""
    documents = [text for text in corpus.documents() if text.strip()]
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for text in cycle(documents):
            file.write(json.dumps({"text": text}) + "\n")
            count += 1
            if file.tell() >= size:
                return count
    return count


def write_models(corpus: Corpus, folder: Path) -> Iterator[Path]:
    """Train both tokenizers, once."""
    pieces = folder / "tokenizer.model"
    if not pieces.exists():
        pieces.write_bytes(train_tokenizer(corpus, VOCABULARY, lambda *_: None))
    yield pieces
    pairs = folder / "byte_pairs"
    if not pairs.exists():
        pairs.mkdir()
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            initial_alphabet=alphabet,
            special_tokens=["</s>"],
            show_progress=False,
        )
        made.train_from_iterator(corpus.documents(), trainer)
        made.save(str(pairs / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
        (pairs / "tokenizer_config.json").write_text(json.dumps(settings))
    yield pairs


def run(way: str, text: Path, model: Path, output: Path, workers: int, megatron: Path) -> Taken:
    """Time a way once; its files stay until its next run."""
    shutil.rmtree(output.parent, ignore_errors=True)
    output.parent.mkdir(parents=True)
    command = [sys.executable, str(ROOT / "tools" / "preprocessing" / "ways.py")]
    command += [way, str(text), str(model), str(output), str(workers)]
    path = megatron if way == "megatron" else ROOT
    variables = {
        "PYTHONPATH": str(path),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    [own], taken = harness.timed(lambda: harness.apart(way, [command], variables))
    return Taken([taken.seconds], *([seconds] for seconds in own))


def compare(folder: Path) -> None:
    """Check that our files equal the files of Megatron's builder.

    Raises:
        ValueError: the files differ.
    """
    for ending in (".bin", ".idx"):
        one, other = (folder / way / f"out_text_document{ending}" for way in ("ours", "megatron"))
        if one.read_bytes() != other.read_bytes():
            raise ValueError(f"{one} and {other} differ")


@dataclass(frozen=True, kw_only=True)
class RaceFlags(harness.RoundFlags):
    """What is compared."""

    folder: Path = required("For everything that is made.")
    megatron_core: Path = required("Where it lies.", metavar="FOLDER")
    megabytes: float = flag(32.0, "Of JSON lines.", POSITIVE)
    workers: int = flag(os.cpu_count() or 1, "Processes.", COUNT, unset="one per core")
    rounds: int = flag(3, "Times that every way runs.", COUNT)


def measure(given: RaceFlags, text: Path, model: Path) -> dict[str, Taken]:
    """Time all ways with a tokenizer."""
    ways = list(ways_for(model))
    taken = {way: Taken() for way in ways}
    for number, way in harness.turns(ways, given.rounds):
        output = given.folder / way / "out"
        once = run(way, text, model, output, given.workers, given.megatron_core)
        taken[way].command += once.command
        taken[way].work += once.work
        taken[way].processors += once.processors
        print(f"{model.name} round {number + 1} {way}: {once.work[0]:.2f} s", file=sys.stderr)
    compare(given.folder)
    return taken


def report(size: int, results: dict[str, dict[str, Taken]]) -> Iterator[str]:
    """Yield the lines of the table, for a text of ``size`` bytes."""
    rows = []
    for model, taken in results.items():
        for way, times in taken.items():
            rate = size / 1e6 / statistics.median(times.processors)
            seconds = map(spread, (times.command, times.work, times.processors))
            rows.append((model, NAMES[way], *seconds, f"{rate:.2f}"))
    names = ("tokenizer", "way", "command, s", "work, s", "work, CPU s", "MB per CPU s")
    return table(names, rows, "llr")


def main(argv: Sequence[str]) -> int:
    """Measure and report."""
    given = read(argv, __doc__, RaceFlags)[RaceFlags]
    given.folder.mkdir(parents=True, exist_ok=True)
    text = given.folder / "text.jsonl"
    corpus = standard_library()
    write_text(corpus, text, int(given.megabytes * 1e6))
    results = {
        model.name: measure(given, text, model) for model in write_models(corpus, given.folder)
    }
    size = text.stat().st_size
    said = (
        f"{size / 1e6:.1f} MB of JSON lines, {given.workers} workers, {given.rounds} rounds; "
        "medians, with the smallest and the largest in brackets. Work is without imports. CPU "
        "seconds are those of all processes together; other work on the machine hardly changes "
        "them."
    )
    measured = {
        model: {way: asdict(own) for way, own in taken.items()} for model, taken in results.items()
    }
    command = ["tools/preprocess_benchmark.py", *argv]
    harness.Run(command, "cpu", said, measured).publish(report(size, results), given)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
