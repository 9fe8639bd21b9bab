"""Corpora that change under a run: it names the file, stops, and saves nothing."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from megatron.data.corpus_watch import CorpusWatch
from megatron.data.datasets import build_datasets
from megatron.data.indexed import IndexedDataset, IndexedWriter
from megatron.data.settings import DataSettings
from megatron.data.shares import Split
from megatron.training import failure
from megatron.training.guard import data_watch
from megatron.training.guard.data_watch import DataWatch
from megatron.training.rendezvous import UserError

ROOT: Final = Path(__file__).resolve().parents[2]
VOCABULARY: Final = 70_000
SEQUENCE: Final = 8


def write(prefix: Path, documents: int, first: int = 0) -> Path:
    """Write documents of 20 tokens."""
    with IndexedWriter(prefix, VOCABULARY) as writer:
        for document in range(documents):
            begin = first + 20 * document
            writer.add_document(np.arange(begin, begin + 20) % VOCABULARY)
    return prefix


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus", 1000)


def watched(prefix: Path) -> CorpusWatch:
    """Watch a corpus, and its content."""
    watch = CorpusWatch(IndexedDataset(prefix).files, 100)
    watch.compare_content()
    return watch


def other_tokens(prefix: Path) -> None:
    """Write other tokens into the file, in place."""
    with Path(f"{prefix}.bin").open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        file.write(b"\1\0\0\0" * (size // 4))


def cut(ending: str) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        path = Path(f"{prefix}{ending}")
        os.truncate(path, path.stat().st_size // 2)

    return change


CHANGES: Final[dict[str, tuple[Callable[[Path], None], str]]] = {
    "other tokens": (other_tokens, r"\.bin has other content than when the run began"),
    "a shorter .bin": (cut(".bin"), r"\.bin has 40000 bytes, and had 80000 when the run began"),
    "a shorter .idx": (cut(".idx"), r"\.idx has 10021 bytes, and had 20042 when the run began"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told_with_the_file(change: str, corpus: Path) -> None:
    watch = watched(corpus)
    assert watch.check() == []
    make, said = CHANGES[change]
    make(corpus)
    with pytest.raises(ValueError, match=f"^{corpus}{said}.*--load"):
        watch.check()


@pytest.mark.parametrize("documents", [1000, 500])
def test_a_replaced_corpus_is_told_once_and_the_old_one_is_read(
    documents: int, corpus: Path
) -> None:
    """Mapped memory is the old file's as long as it is mapped (mmap(2))."""
    old = IndexedDataset(corpus)
    watch = watched(corpus)
    write(corpus, documents, first=7)
    lines = [
        f"{path} was replaced; this run goes on with the old file; a restart would read the new one"
        for path in old.files
    ]
    assert watch.check() == lines
    assert watch.check() == []
    sizes = [20] * 1000
    assert old.lengths.tolist() == sizes
    with Path(f"{corpus}.bin").open("r+b") as file:
        file.truncate(8)
    assert watch.check() == []


def test_a_change_of_a_last_byte_is_seen(corpus: Path) -> None:
    watch = watched(corpus)
    with Path(f"{corpus}.bin").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(ValueError, match="has other content"):
        watch.check()


def test_what_changes_no_token_is_noted_once(corpus: Path) -> None:
    watch = watched(corpus)
    os.utime(f"{corpus}.bin", (1e9, 1e9))
    (note,) = watch.check()
    assert re.match(
        rf"{corpus}\.bin was written to on 2001-09-\d\d \d\d:\d\d:\d\d, while the", note
    )
    assert watch.check() == []
    Path(f"{corpus}.idx").unlink()
    (note,) = watch.check()
    assert note.startswith(f"{corpus}.idx cannot be read any more")
    assert watch.check() == []


def test_an_epoch_ends_where_the_first_corpus_of_a_blend_begins_anew(tmp_path: Path) -> None:
    """100 x 20 tokens at a share of 1/4, and 30 x 20 at 3/4: 1000 and 100 samples of 8 tokens."""
    blend = ((1.0, write(tmp_path / "a", 100)), (3.0, write(tmp_path / "b", 30)))
    config = DataSettings(split=Split(1, 0, 0), seq_length=SEQUENCE, seed=0, blend=blend)
    made = build_datasets(config, (10, 0, 0), VOCABULARY).corpora
    assert made.epoch == 100
    assert [path.name for path in made.files] == ["a.bin", "a.idx", "b.bin", "b.idx"]


def test_files_are_checked_when_an_epoch_begins(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_watch, "AT_MOST_EVERY", 0.0)
    watch = DataWatch(watched(corpus), print)
    other = DataWatch(CorpusWatch(IndexedDataset(corpus).files, 100), print)
    assert not watch.is_due(40)
    assert not watch.is_due(99)
    assert watch.is_due(100)
    assert not watch.is_due(140)
    assert watch.is_due(360)
    other_tokens(corpus)
    with pytest.raises(UserError, match=rf"^{corpus}\.bin has other content"):
        watch.check()
    other.check()  # the first rank of the machine compares content
    cut(".bin")(corpus)
    with pytest.raises(UserError, match="bytes, and had"):
        other.check()


READS: Final = """
import os, sys
from pathlib import Path
import numpy as np
from megatron.data.settings import DataSettings
from megatron.data.shares import Split
from megatron.data.datasets import build_datasets
prefix, pattern = Path(sys.argv[1]), sys.argv[2]
config = DataSettings(split=Split(1, 0, 0), seq_length=8, seed=0, blend=((1.0, prefix),))
train = build_datasets(config, (100, 0, 0), 70000).train
sample = np.empty(9, np.int64)
train.read(0, sample)
(file,) = prefix.parent.glob(pattern)
os.truncate(file, 0)
print(file)
for number in range(100):
    train.read(number, sample)
"""
"""Reads samples, and cuts a file short in between."""


@pytest.mark.parametrize(
    "pattern", ["corpus.bin", "corpus.idx", "*/*-samples.npy", "*/*-shuffle.npy"]
)
def test_a_file_that_is_cut_short_is_named_where_a_rank_dies(pattern: str, corpus: Path) -> None:
    command = [sys.executable, "-u", "-c", READS, str(corpus), pattern]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr  # by the signal it would be -7
    assert f"error: {done.stdout.strip()} cannot be read: it was cut short" in done.stderr


def test_torchruns_report_ends_with_the_file(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same file as ``tell_torchrun`` writes, but for the reason and the time."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "like.json"))
    assert failure.tell_torchrun("the reason")
    like = json.loads((tmp_path / "like.json").read_text())
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    reports = (
        "from megatron.data.index_builder import load_index_builder\n"
        "from megatron.training.failure import form_of_report\n"
        "load_index_builder().report_bus_errors(*form_of_report())\n"
    )
    command = [sys.executable, "-c", reports + READS, str(corpus), "corpus.bin"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "")
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    reason = told["message"]
    assert reason.startswith(f"error: {corpus}.bin cannot be read: it was cut short")
    assert told["extraInfo"]["py_callstack"] == f"\n{reason}"
    assert int(told["extraInfo"]["timestamp"]) - int(like["message"]["extraInfo"]["timestamp"]) >= 0
    assert told.keys() == like["message"].keys()
    assert told["extraInfo"].keys() == like["message"]["extraInfo"].keys()


MAPS_ALONE: Final = """
import mmap, os, sys, tempfile
import numpy as np
from megatron.data.index_builder import load_index_builder
kept = np.zeros(1 << 16, np.uint8)
load_index_builder().name_bus_errors(kept.ctypes.data, kept.nbytes, b"not this one", b"nor this")
with tempfile.TemporaryFile() as file:
    file.truncate(1 << 16)
    alone = mmap.mmap(file.fileno(), 0)
    file.truncate(0)
    alone[0]
"""


def test_other_memory_has_the_usual_end() -> None:
    done = subprocess.run([sys.executable, "-c", MAPS_ALONE], cwd=ROOT, capture_output=True)
    assert done.returncode == -7
    assert b"not this one" not in done.stderr


JOB: Final = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "8", "--max-position-embeddings", "8", "--micro-batch-size", "1"),
    *("--global-batch-size", "2", "--lr", "1e-3", "--train-iters", "100000"),
    *("--save-interval", "5", "--log-interval", "1000", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", str(VOCABULARY), "--split", "1,0,0", "--eval-iters", "0"),
)


def test_a_run_stops_and_saves_nothing_after_other_tokens(corpus: Path, tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *JOB]
    command += ["--data-path", str(corpus), "--save", str(saves)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("saved "):
                    break
            else:
                pytest.fail("the run has ended before it saved")
            other_tokens(corpus)
            rest = process.stdout.read()
            assert process.wait() == 2, rest
        finally:
            process.kill()
    assert f"error: {corpus}.bin has other content than when the run began" in rest
    assert rest.count("saved ") <= 1  # a save may have begun when the tokens were written
