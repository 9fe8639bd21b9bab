"""Raw text to token files: Megatron-LM's bytes, however many work and however often they die."""

import codecs
import errno
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from data import raw_text
from data.raw_text import FORMS, expected, lines, numbers, write_plain
from harness.properties import examples
from harness.small_vocabularies import gpt2_files
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.tokenize import punkt

from megatron.data.indexed import IndexedDataset
from megatron.data.preparation import text_files, unfinished
from megatron.data.preparation.encode import EncodeConfig, Tokens
from megatron.data.preparation.preprocess import PreprocessConfig, Status, preprocess
from megatron.data.preparation.sentences import SentenceConfig
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "preprocess_data.py"
GOLDEN = Path(__file__).with_name("golden") / "megatron_core_0.16.1"
TEXTS = numbers(200)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 300)
    monkeypatch.setattr(text_files, "BLOCK_ROWS", 20)


def config(folder: Path, *inputs: Path, encode: EncodeConfig | None = None) -> PreprocessConfig:
    return PreprocessConfig(inputs, folder / "out", encode or raw_text.settings())


def silent(status: Status) -> None:
    assert 0 <= status.done_bytes <= status.total_bytes


def written(folder: Path, name: str = "out_text_document") -> tuple[bytes, bytes]:
    return (folder / f"{name}.bin").read_bytes(), (folder / f"{name}.idx").read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_the_same_files(tmp_path: Path, form: str) -> None:
    FORMS[form](tmp_path / "in", TEXTS)
    status = preprocess(config(tmp_path, tmp_path / "in"), silent)
    assert written(tmp_path) == expected(TEXTS)
    size = (tmp_path / "in").stat().st_size
    assert (status.documents, status.bad, status.done_bytes) == (len(TEXTS), 0, size)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in",
        "out_text_document.bin",
        "out_text_document.idx",
    ]


@given(
    texts=st.lists(
        st.lists(st.integers(0, raw_text.VOCABULARY)).map(lambda ids: " ".join(map(str, ids))),
        min_size=1,
    ),
    append_eod=st.booleans(),
    block=st.integers(1, 400),
)
@settings(max_examples=examples(40), deadline=None)
def test_any_text_becomes_what_megatron_makes_of_it(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], append_eod: bool, block: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    write_plain(folder / "in", texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "BLOCK_BYTES", block)
        made = config(folder, folder / "in", encode=raw_text.settings(append_eod))
        if not any(texts):  # Megatron writes an empty .bin
            with pytest.raises(ValueError, match="makes no token of its"):
                preprocess(made, silent)
            return
        preprocess(made, silent)
    assert written(folder) == expected(texts, append_eod)


@pytest.mark.parametrize("vocabulary", [1000, 70000])
def test_the_files_are_those_that_megatron_core_writes(tmp_path: Path, vocabulary: int) -> None:
    """The golden files were made by golden/make.py with megatron-core 0.16.1."""
    write_plain(tmp_path / "in", numbers(40, vocabulary))
    preprocess(
        config(tmp_path, tmp_path / "in", encode=raw_text.settings(vocabulary=vocabulary)), silent
    )
    assert written(tmp_path) == written(GOLDEN, f"{vocabulary}_text_document")


def test_workers_change_nothing(tmp_path: Path) -> None:
    """Two files in one, three processes, bad lines in both files."""
    bad = b'{"text": 1}\n'
    (tmp_path / "a").write_bytes(lines(TEXTS[:90]) + bad + lines(TEXTS[90:100]))
    (tmp_path / "b").write_bytes(lines(TEXTS[100:]) + bad + bad)
    one = config(tmp_path, tmp_path / "a", tmp_path / "b")
    alone = preprocess(one, silent)
    assert written(tmp_path) == expected(TEXTS)
    assert preprocess(replace(one, workers=3), silent) == alone
    assert written(tmp_path) == expected(TEXTS)
    assert [told.split(" has ")[0] for told in alone.told] == [
        f"{tmp_path / 'a'} line 91",
        f"{tmp_path / 'b'} line 101",
        f"{tmp_path / 'b'} line 102",
    ]


KILLED = """
import os, signal, sys
from pathlib import Path
from megatron.data.preparation import text_files, unfinished
from megatron.data.preparation.preprocess import PreprocessConfig, preprocess
from data.raw_text import settings

folder, place, blocks, workers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
text_files.BLOCK_BYTES, text_files.BLOCK_ROWS = 300, 20
seen = 0

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def report(status):
    global seen
    seen += 1
    if seen > blocks and place == "block":
        die()

if __name__ == "__main__":
    if place == "names":
        rename = Path.replace
        Path.replace = lambda a, b: die() if str(b).endswith("t.idx") else rename(a, b)
    save = 0 if blocks % 2 else 1e9
    inputs = (folder / "a", folder / "b")
    config = PreprocessConfig(inputs, folder / "out", settings(), workers, save_seconds=save)
    preprocess(config, report)
"""


@pytest.mark.parametrize(
    "form",
    [
        "plain",
        "zstandard",
        pytest.param("gzip", marks=pytest.mark.full),
        pytest.param("parquet", marks=pytest.mark.full),
    ],
)
def test_a_killed_run_goes_on_and_writes_the_same_bytes(tmp_path: Path, form: str) -> None:
    """Killed in the first file, in the second, without a state, and between two renames."""
    FORMS[form](tmp_path / "a", TEXTS[:120])
    write_plain(tmp_path / "b", TEXTS[120:])
    starts = []
    for place, blocks, workers in [
        ("block", 2, 1),
        ("block", 3, 1),
        ("block", 9, 2),
        ("names", 0, 1),
    ]:
        script = tmp_path / "killed.py"
        script.write_text(KILLED)
        words = [sys.executable, str(script), str(tmp_path), place, str(blocks), str(workers)]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        run = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, timeout=60)
        assert run.returncode == -signal.SIGKILL
        state = unfinished.read_state(tmp_path / "out.unfinished")
        starts.append(state.documents if state else 0)
    assert starts[0] == 0 < starts[1] < starts[2] < starts[3] == len(TEXTS)
    status = preprocess(config(tmp_path, tmp_path / "a", tmp_path / "b"), silent)
    assert written(tmp_path) == expected(TEXTS)
    assert status.documents == len(TEXTS)
    assert not (tmp_path / "out.unfinished").exists()


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    write_plain(tmp_path / "in", TEXTS)
    calls: list[int] = []

    def interrupt(status: Status) -> None:
        calls.append(status.documents)
        if len(calls) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(config(tmp_path, tmp_path / "in"), interrupt)
    again: list[int] = []
    preprocess(config(tmp_path, tmp_path / "in"), lambda status: again.append(status.documents))
    assert again[0] == calls[3] > 0
    assert written(tmp_path) == expected(TEXTS)


def test_another_command_does_not_go_on_with_what_was_left(tmp_path: Path) -> None:
    test_an_interrupted_run_goes_on_where_it_was(tmp_path)
    write_plain(tmp_path / "in", TEXTS)
    given = config(tmp_path, tmp_path / "in")

    def interrupt(status: Status) -> None:
        if status.documents:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(given, interrupt)
    other = replace(given, encode=raw_text.settings(append_eod=False))
    with pytest.raises(ValueError, match=r"had another --append-eod: .*--restart"):
        preprocess(other, silent)
    preprocess(replace(other, restarts=True), silent)
    assert written(tmp_path) == expected(TEXTS, append_eod=False)


BAD = [
    b"{cut",
    b'{"other": "1"}',
    b'["text"]',
    b'{"text": null}',
    b'{"text": "1 x"}',
    b'{"text": "1001"}',
    b'{"text": "\\ud800"}',
    b'{"text": "\xff"}',
    b"[" * 100_000,
    b'{"text": ["1", 2]}',
    b'{"text": "-1"}',
    b"nan",
]


def test_bad_lines_are_counted_and_the_first_ten_named(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(
        lines(["1"]) + b"\n".join([*BAD[:6], b"", *BAD[6:]]) + b"\n" + lines(["2 3"])
    )
    status = preprocess(config(tmp_path, tmp_path / "in"), silent)
    assert written(tmp_path) == expected(["1", "2 3"])
    assert (status.documents, status.bad) == (2, len(BAD))
    numbered = [2, 3, 4, 5, 6, 7, 9, 10, 11, 12]
    for told, line in zip(status.told, numbered, strict=True):
        assert told.startswith(f"{tmp_path / 'in'} line {line} ")
    reasons: tuple[str, ...]
    reasons = ("no JSON", "no key 'text'", "list", "NoneType", "encoded", "1001", "surrogate")
    reasons += ("UTF-8", "no JSON", "list")
    assert all(why in told for why, told in zip(reasons, status.told, strict=True))


def test_byte_order_marks_before_lines_are_no_part_of_them(tmp_path: Path) -> None:
    """Editors write one before a file; the second is there where ``cat`` has joined two files."""
    content = codecs.BOM_UTF8 + lines(["1", "2"]) + codecs.BOM_UTF8 + lines(["3"])
    (tmp_path / "in").write_bytes(content)
    status = preprocess(config(tmp_path, tmp_path / "in"), silent)
    assert written(tmp_path) == expected(["1", "2", "3"])
    assert status.bad == 0


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            b"\n".join(BAD),
            r"no document in it \(bad lines: 12, the first: .*in line 1 is no JSON.*\)",
        ),
        (b"", r"no document in it; give files whose records have text under --json-keys text$"),
    ],
    ids=["bad", "empty"],
)
def test_input_without_a_document_is_told(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "in").write_bytes(content)
    with pytest.raises(ValueError, match=f"--input {tmp_path / 'in'}: there is {told}"):
        preprocess(replace(config(tmp_path, tmp_path / "in"), save_seconds=0), silent)
    assert [path.name for path in tmp_path.iterdir()] == ["in"], "the next run begins anew"


@pytest.mark.parametrize("workers", [-1, 0, 10**9])
def test_a_number_of_workers_out_of_range_is_told(tmp_path: Path, workers: int) -> None:
    write_plain(tmp_path / "in", TEXTS)
    with pytest.raises(ValueError, match=f"--workers {workers}: give 1 to 1024"):
        preprocess(replace(config(tmp_path, tmp_path / "in"), workers=workers), silent)


def test_strict_ends_at_the_first_bad_line(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(lines(["1"] * 50) + BAD[0])
    with pytest.raises(ValueError, match=r"--strict: .*in line 51 is no JSON.*leave --strict out"):
        preprocess(replace(config(tmp_path, tmp_path / "in"), is_strict=True), silent)
    assert not list(tmp_path.glob("*.idx"))


def test_every_key_has_its_files(tmp_path: Path) -> None:
    rows = [{"a": "1 2", "b": "3"}, {"a": "", "b": "4 5 6"}]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, rows)))
    both = replace(raw_text.settings(), keys=("a", "b"))
    preprocess(config(tmp_path, tmp_path / "in", encode=both), silent)
    for key in ("a", "b"):
        assert written(tmp_path, f"out_{key}_document") == expected([row[key] for row in rows])


def test_sentences_are_sequences_of_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NLTK's own splitter, on data for a language that is made here."""
    data = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "numbers"
    data.mkdir(parents=True)
    monkeypatch.setattr("nltk.data.path", [str(tmp_path / "nltk")])
    parameters = punkt.PunktParameters()
    parameters.abbrev_types.add("no")
    punkt.save_punkt_params(parameters, dir=str(data))
    texts = ["Fox one. Fox two!\n\nSee no. five.", "", "One"]
    (tmp_path / "in").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    encode = EncodeConfig(gpt2_files(tmp_path), sentences=SentenceConfig("numbers"))
    preprocess(config(tmp_path, tmp_path / "in", encode=encode), silent)
    text_of = build_tokenizer(encode.tokenizer).detokenize
    dataset = IndexedDataset(tmp_path / "out_text_sentence")
    found = [text_of(dataset[n].tolist()) for n in range(len(dataset))]
    assert found == ["Fox one.", "Fox two!", "See no. five.", "One"]
    assert dataset.document_indices.tolist() == [0, 3, 3, 4]
    kept = replace(encode, sentences=SentenceConfig("numbers", keep_newlines=True))
    preprocess(config(tmp_path, tmp_path / "in", encode=kept), silent)
    dataset = IndexedDataset(tmp_path / "out_text_sentence")
    assert "".join(text_of(dataset[n].tolist()) for n in range(3)) == texts[0]


def test_without_the_data_of_a_language_the_way_to_it_is_told(tmp_path: Path) -> None:
    write_plain(tmp_path / "in", TEXTS)
    encode = replace(raw_text.settings(), sentences=SentenceConfig("klingon"))
    with pytest.raises(ValueError, match=r"--lang klingon: python -m nltk\.downloader punkt_tab"):
        preprocess(config(tmp_path, tmp_path / "in", encode=encode), silent)


@pytest.mark.parametrize(
    ("compress", "cut"),
    [
        pytest.param(gzip.compress, 30, id="gzip"),
        pytest.param(zstandard.ZstdCompressor().compress, 30, id="zstandard"),
        pytest.param(gzip.compress, 1, id="gzip-end"),
        pytest.param(zstandard.ZstdCompressor().compress, 1, id="zstandard-end"),
    ],
)
def test_a_compressed_file_that_is_cut_short_is_told(
    tmp_path: Path, compress: Callable[[bytes], bytes], cut: int
) -> None:
    (tmp_path / "in").write_bytes(compress(lines(TEXTS))[:-cut])
    with pytest.raises(ValueError, match=r"--input .*in is damaged, cut short .*copy it again"):
        preprocess(config(tmp_path, tmp_path / "in"), silent)
    assert not list(tmp_path.glob("*.idx"))


def test_a_full_disk_is_told_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plain(tmp_path / "in", TEXTS)
    append = unfinished.Unfinished.append
    calls: list[int] = []

    def full(self: unfinished.Unfinished, tokens: dict[str, Tokens]) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, tokens)

    monkeypatch.setattr(unfinished.Unfinished, "append", full)
    given = replace(config(tmp_path, tmp_path / "in"), save_seconds=0)
    with pytest.raises(ValueError, match=r"--output-prefix .*No space left.*make room"):
        preprocess(given, silent)
    starts: list[int] = []
    preprocess(given, lambda status: starts.append(status.documents))
    assert starts[0] > 0
    assert written(tmp_path) == expected(TEXTS)


def test_two_runs_do_not_write_the_same_files(tmp_path: Path) -> None:
    write_plain(tmp_path / "in", TEXTS)
    given = config(tmp_path, tmp_path / "in")
    with unfinished.held(given.folder), pytest.raises(ValueError, match="another run is writing"):
        preprocess(given, silent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": (Path("nothing"),)}, "--input nothing is not a file"),
        ({"workers": 0}, "--workers 0"),
        ({"output_prefix": Path("no/such/out")}, "--output-prefix no/such/out: its folder"),
        (
            {"encode": EncodeConfig(TokenizerSettings("NullTokenizer"), ("a/b",))},
            "--json-keys a/b: 'a/b'",
        ),
        ({"encode": EncodeConfig(TokenizerSettings("NullTokenizer"))}, "--vocab-size None"),
    ],
    ids=["input", "workers", "output", "keys", "tokenizer"],
)
def test_what_cannot_be_done_is_told_before_anything_is_written(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    write_plain(tmp_path / "in", TEXTS)
    given = replace(config(tmp_path, tmp_path / "in"), **changes)  # type: ignore[arg-type] # any field
    with pytest.raises(ValueError, match=f"^{message}"):
        preprocess(given, silent)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_the_tool_prints_a_path_for_training(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines(TEXTS[:50]) + b"{\n")
    words = ["--input", "in.jsonl", "--output-prefix", "corpus", "--append-eod", "--workers", "2"]
    words += ["--partitions", "4", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
    run = subprocess.run(
        [sys.executable, str(TOOL), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stdout) == (0, "DATA_PATH=corpus_text_document\n"), run.stderr
    assert "in.jsonl line 51 is no JSON" in run.stderr
    assert "note: --partitions changes nothing" in run.stderr
    assert written(tmp_path, "corpus_text_document") == expected(TEXTS[:50])
    words[-1] = "0"
    refused = subprocess.run(
        [sys.executable, str(TOOL), *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.splitlines()[-1].startswith("error: --vocab-size 0: must be")
