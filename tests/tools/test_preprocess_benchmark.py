"""The comparison of preprocessing: its own way writes files, and a way that fails is told."""

import json
from pathlib import Path

import pytest

from megatron.data.corpus import text_files
from megatron.data.indexed import IndexedDataset
from tools.preprocess_benchmark import (
    Taken,
    compare,
    report,
    run,
    write_models,
    write_text,
)
from tools.preprocessing.ways import type_of, ways_for


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tools.preprocess_benchmark.VOCABULARY", 330)
    (tmp_path / "raw.txt").write_text("def f(x):\n    return x + 1\n\n" * 20)
    corpus = text_files([tmp_path / "raw.txt"])
    assert write_text(corpus, tmp_path / "text.jsonl", 3000) > 3
    list(write_models(corpus, tmp_path))
    return tmp_path / "text.jsonl"


def test_own_way_writes_every_document_with_both_tokenizers(text: Path) -> None:
    documents = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    for model, ways in (("tokenizer.model", 2), ("byte_pairs", 3)):
        path = text.with_name(model)
        assert len(list(ways_for(path))) == ways
        taken = run("ours", text, path, text.parent / "ours" / "out", 1, text.parent)
        assert taken.work[0] > 0
        assert taken.processors[0] >= 0
        written = IndexedDataset(text.parent / "ours" / "out_text_document")
        assert len(written) == len(documents)
    assert type_of(text.with_name("byte_pairs")) == "HuggingFaceTokenizer"


def test_a_way_that_fails_is_told_with_its_words(text: Path) -> None:
    """Without Megatron-Core nothing is imported; with it, there is no such text."""
    missing, model = text.with_name("none.jsonl"), text.with_name("tokenizer.model")
    with pytest.raises(
        RuntimeError, match=r"megatron ended with 1:(?s:.*)No (module named|such file)"
    ):
        run("megatron", missing, model, text.parent / "megatron" / "out", 1, text.parent)


def test_files_that_differ_are_told(tmp_path: Path) -> None:
    for way in ("ours", "megatron"):
        (tmp_path / way).mkdir()
        for ending in (".bin", ".idx"):
            (tmp_path / way / f"out_text_document{ending}").write_bytes(b"same")
    compare(tmp_path)
    (tmp_path / "ours" / "out_text_document.idx").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"out_text_document\.idx and .* differ"):
        compare(tmp_path)


def test_the_report_has_a_row_for_each_way_with_medians() -> None:
    taken = {"ours": Taken([2.0, 1.0, 9.0], [1.5, 0.5, 8.0], [4.0, 2.0, 1.0])}
    *_, row = report(10_000_000, {"tokenizer.model": taken})
    assert row.split(" | ")[2:] == [
        "2.00 (1.00 to 9.00)",
        "1.50 (0.50 to 8.00)",
        "2.00 (1.00 to 4.00)",
        "5.00 |",
    ]
