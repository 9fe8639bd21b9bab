"""Sample data: lossless, of the size asked for, complete or absent, and made once."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import prepare as prepare_module
from megatron.data.corpus import Corpus, standard_library, text_files
from megatron.data.indexed import IndexedDataset
from megatron.data.prepare import prepare, tokenise, train_tokenizer, unused_pieces
from megatron.data.tokenizers.sentence_pieces import GPTSentencePieceTokenizer

TOOL = Path(__file__).resolve().parents[2] / "tools" / "sample_data.py"
TEXT = "def f(x):\n\n        return  x + 1 \t# \u4f60\u597d\r\n\nclass A:\n    pass\n" * 40


def silent(stage: str, done: int, total: int | None) -> None:
    assert total is None or 0 <= done <= total


def snippets(folder: Path, *texts: str) -> Corpus:
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"{number}.txt")
        paths[-1].write_bytes(text.encode())
    return text_files(paths)


def run_tool(*arguments: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True)


def test_documents_survive_the_round_trip(tmp_path: Path) -> None:
    texts = [TEXT, "", "  \n\n\n", "\ufeffBOM and \u4f60\u597d \x00 \x1f", "no final newline"]
    folder = prepare(snippets(tmp_path, *texts), 32000, tmp_path / "cache", silent)
    tokenizer = GPTSentencePieceTokenizer(folder / "tokenizer.model")
    dataset = IndexedDataset(folder / "text_document")
    documents = [dataset[i].tolist() for i in range(len(dataset))]
    assert tokenizer.vocab_size == 32000
    assert [document[-1] for document in documents] == [tokenizer.eod] * len(documents)
    assert all(tokenizer.eod not in document[:-1] for document in documents)
    assert [tokenizer.detokenize(document[:-1]) for document in documents] == [
        text for text in texts if text
    ]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    corpus = snippets(tmp_path_factory.mktemp("small"), TEXT)
    return train_tokenizer(corpus, 400, silent)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
@settings(deadline=None)
def test_any_text_is_encoded_without_loss(
    tmp_path_factory: pytest.TempPathFactory, small_model: bytes, text: str
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "tokenizer.model").write_bytes(small_model)
    tokenizer = GPTSentencePieceTokenizer(folder / "tokenizer.model")
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_a_vocabulary_beyond_the_text_is_filled_with_unused_pieces(
    tmp_path: Path, small_model: bytes
) -> None:
    corpus = snippets(tmp_path, TEXT)
    (tmp_path / "x.model").write_bytes(train_tokenizer(corpus, 1000, silent))
    processor = GPTSentencePieceTokenizer(tmp_path / "x.model").processor
    unused = [index for index in range(1000) if processor.is_unused(index)]
    assert processor.vocab_size() == 1000
    assert unused == list(range(1000 - len(unused), 1000))
    assert unused
    assert not set(processor.encode(TEXT + "<unused0>")) & set(unused)
    assert unused_pieces(tmp_path / "x.model") == len(unused)
    (tmp_path / "x.model").write_bytes(train_tokenizer(corpus, 1000 - len(unused), silent))
    assert unused_pieces(tmp_path / "x.model") == 0


def test_a_vocabulary_without_room_for_the_characters_is_refused(tmp_path: Path) -> None:
    """The size that the message names is enough."""
    corpus = snippets(tmp_path, TEXT)
    with pytest.raises(ValueError, match=r"vocabulary of 200 is too small") as caught:
        train_tokenizer(corpus, 200, silent)
    (needed,) = re.findall(r"take (\d+) entries", str(caught.value))
    assert train_tokenizer(corpus, int(needed), silent)


def test_words_and_lines_of_any_length_train(tmp_path: Path) -> None:
    corpus = snippets(tmp_path, "x" * 70000 + " " + "ab " * 3_000)
    assert train_tokenizer(corpus, 400, silent)


def test_training_text_is_spread_over_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for a third of the text, every third document is read, to the end."""
    corpus = snippets(tmp_path, *(f"document{i:03d}" for i in range(90)))
    monkeypatch.setattr(prepare_module, "_TRAINING_BYTES", 30 * len("document000"))
    lines = list(prepare_module._training_lines(corpus, silent))
    assert lines == [f"document{i:03d}" for i in range(0, 90, 3)]


@given(st.lists(st.sampled_from(["a line\n", "\n", "  \r\n", "b" * 50 + "\n", "end"]), max_size=30))
def test_cut_documents_join_to_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    path = tmp_path_factory.mktemp("cut") / "x.txt"
    path.write_bytes("".join(lines).encode())
    size = path.stat().st_size
    documents = list(Corpus("x", (path,), size, document_bytes=60).documents())
    assert "".join(documents).encode() == path.read_bytes()
    for document in documents[:-1]:
        assert len(document) >= 60
        assert not document.splitlines()[-1].strip()


def test_one_large_file_gives_documents_to_split(tmp_path: Path) -> None:
    corpus = snippets(tmp_path, "some words\n" * 20 + "\n" + TEXT * 100)
    assert len(list(corpus.documents())) >= 3


def test_a_changed_file_is_another_corpus(tmp_path: Path) -> None:
    before = snippets(tmp_path, "abc").name
    assert snippets(tmp_path, "abcd").name != before
    os.utime(tmp_path / "0.txt", ns=(1, 1))
    assert snippets(tmp_path, "abcd").name != before


def test_standard_library_is_code_of_this_python_only() -> None:
    corpus = standard_library()
    names = {path.name for path in corpus.paths}
    assert {"argparse.py", "typing.py"} <= names
    assert not any("site-packages" in path.parts for path in corpus.paths)
    assert corpus.paths == standard_library().paths
    assert ".".join(map(str, sys.version_info[:3])) in corpus.name


def test_python_without_sources_is_told_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"no \.py files under .*--text"):
        standard_library()


@pytest.mark.parametrize("text", ["", "\n\n\n"])
def test_text_without_words_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"no text in it|only line ends"):
        train_tokenizer(snippets(tmp_path, text), 400, silent)


def test_interruption_leaves_nothing_to_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = snippets(tmp_path, TEXT, TEXT)
    cache = tmp_path / "cache"

    def interrupted(stage: str, done: int, total: int | None) -> None:
        if stage == "tokenising":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, 32000, cache, interrupted)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_killed_run_is_cleared_away_and_redone(tmp_path: Path) -> None:
    corpus = snippets(tmp_path, TEXT)
    cache = tmp_path / "cache"
    stale = cache / f".{corpus.name}-32k.99999-0123abcd"
    stale.mkdir(parents=True)
    (stale / "tokenizer.model").write_bytes(b"half")
    folder = prepare(corpus, 32000, cache, silent)
    assert not stale.exists()
    assert len(IndexedDataset(folder / "text_document")) == 1


def test_a_full_disk_is_told_with_its_folder_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare_module, "train_tokenizer", full)
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=rf"^{cache} has no room for .*--cache or MEGATRON_CACHE"):
        prepare(snippets(tmp_path, TEXT), 400, cache, silent)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_second_call_does_no_work(tmp_path: Path) -> None:
    corpus = snippets(tmp_path, TEXT)
    first = prepare(corpus, 32000, tmp_path / "cache", silent)

    def refuse(stage: str, done: int, total: int | None) -> None:
        raise AssertionError("worked again")

    assert prepare(corpus, 32000, tmp_path / "cache", refuse) == first


def test_progress_covers_the_corpus(tmp_path: Path, small_model: bytes) -> None:
    corpus = snippets(tmp_path, TEXT, TEXT)
    calls: list[tuple[str, int, int | None]] = []
    tokenise(corpus, small_model, tmp_path / "x", lambda *call: calls.append(call), 1)
    assert calls[-1] == ("tokenising", corpus.num_bytes, corpus.num_bytes)


@pytest.fixture(scope="module")
def racing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[str]]:
    """Two runs of the tool at once, from a foreign folder, and one after them."""
    folder = tmp_path_factory.mktemp("tool")
    snippets(folder, TEXT)
    arguments = ("--vocab-size", "32k", "--text", folder / "0.txt", "--cache", folder / "cache")
    runs = [run_tool(*arguments, cwd=folder) for _ in range(2)]
    outputs = [run.communicate(timeout=120) for run in runs]
    again = run_tool(*arguments, cwd=folder)
    outputs.append(again.communicate(timeout=120))
    assert [run.returncode for run in (*runs, again)] == [0, 0, 0]
    return folder, [output[0] for output in outputs], [output[1] for output in outputs]


def test_tool_prints_paths_that_a_shell_can_read(
    racing: tuple[Path, list[str], list[str]],
) -> None:
    folder, outputs, _ = racing
    assert len(set(outputs)) == 1
    values = dict(line.split("=", 1) for line in outputs[0].splitlines()[-2:])
    assert list(values) == ["DATA_PATH", "TOKENIZER_MODEL"]
    assert Path(values["DATA_PATH"]).is_relative_to(folder / "cache")
    assert len(IndexedDataset(Path(values["DATA_PATH"]))) == 1
    assert GPTSentencePieceTokenizer(Path(values["TOKENIZER_MODEL"])).vocab_size == 32000


def test_of_racing_tools_one_works(racing: tuple[Path, list[str], list[str]]) -> None:
    folder, _, errors = racing
    assert sum("tokenising: 100 %" in error for error in errors) == 1
    assert errors[2].startswith(
        f"tokenizer and token files are kept in {folder / 'cache'}; --cache"
    )
    assert errors[2].count("\n") == 2  # the place and the note, and no progress


def test_entries_that_stand_for_nothing_are_noted(
    racing: tuple[Path, list[str], list[str]],
) -> None:
    """Whoever made them: the tokenizer is the same."""
    folder, _, errors = racing
    (model,) = folder.glob("cache/*-32k/tokenizer.model")
    unused = unused_pieces(model)
    assert unused > 0
    for error in errors:
        assert f"note: {unused} of the 32000 entries stand for nothing" in error
        assert f"--vocab-size {32000 - unused} holds the others" in error


def test_small_and_odd_sizes_are_made_without_a_note(tmp_path: Path) -> None:
    corpus = snippets(tmp_path, TEXT)
    for size in ("300", "320"):
        arguments = ("--vocab-size", size, "--text", *corpus.paths, "--cache", tmp_path / "cache")
        run = run_tool(*arguments)
        output, error = run.communicate(timeout=120)
        assert run.returncode == 0, error
        assert "note:" not in error
        (model,) = re.findall("^TOKENIZER_MODEL=(.*)$", output, re.MULTILINE)
        assert GPTSentencePieceTokenizer(Path(model)).vocab_size == int(size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vocab-size", "48kb"), "--vocab-size 48kb: give a number of entries"),
        (("--vocab-size", "1001k"), "--vocab-size 1001k: give a number of entries"),
        (("--vocab-size", "100"), "--vocab-size 100: give a number of entries"),
        (("--vocab-size", "32k", "--text", "absent.txt"), "--text absent.txt is not a file"),
    ],
)
def test_tool_refuses_in_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    run = run_tool(*arguments, "--cache", tmp_path, cwd=tmp_path)
    output, error = run.communicate(timeout=60)
    assert (run.returncode, output) == (2, "")
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
