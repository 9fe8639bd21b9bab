"""Sampling against the token stream it is defined on."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.data.index_builder import IndexBuilder
from megatron.data.index_cache import checksum
from megatron.data.indexed import IndexedDataset, IndexedWriter
from megatron.data.samples import Epochs, GPTDataset, SampleIndices, build_sample_indices

Write = Callable[..., IndexedDataset]
LENGTHS = [5, 1, 0, 12, 3, 30, 2, 2, 9, 17]


def dataset_of(
    source: IndexedDataset, sequences: range, seq_length: int, num_samples: int, cache: Path
) -> GPTDataset:
    indices = build_sample_indices(
        source, sequences, seq_length, num_samples, 7, cache, IndexBuilder()
    )
    return GPTDataset(source, indices, seq_length, vocab_size=70000)


def all_samples(dataset: GPTDataset) -> list[list[int]]:
    out = np.empty(dataset.seq_length + 1, np.int64)
    samples = []
    for index in range(len(dataset)):
        dataset.read(index, out)
        samples.append(out.tolist())
    return samples


def reference_samples(
    documents: list[list[int]], seq_length: int, num_samples: int, seed: int
) -> list[list[int]]:
    """Megatron-LM's procedure on plain lists: shuffle documents, concatenate, cut, shuffle."""
    tokens = sum(map(len, documents))
    epochs = 1
    while epochs * tokens < num_samples * seq_length + 1:
        epochs += 1
    before_last = ((epochs - 1) * tokens - 1) // seq_length if epochs > 1 else 0
    separate = epochs > 1 and num_samples - before_last < int(0.8 * ((tokens - 1) // seq_length))
    random = np.random.RandomState(seed)
    rounds = [epochs - 1, 1] if separate else [epochs]
    stream: list[int] = []
    for count in rounds:
        order = np.array(list(range(len(documents))) * count)
        random.shuffle(order)
        stream += [token for document in order for token in documents[document]]
    total = (epochs * tokens - 1) // seq_length
    cut = [stream[i * seq_length : (i + 1) * seq_length + 1] for i in range(total)]
    boundary = before_last if separate else total
    shuffled = []
    for part in (range(boundary), range(boundary, total)):
        order = np.array(part, dtype=np.uint32)
        if len(order):
            random.shuffle(order)
        shuffled += [cut[i] for i in order]
    return shuffled


@given(
    lengths=st.lists(st.integers(0, 15), min_size=1, max_size=12),
    seq_length=st.integers(1, 12),
    num_samples=st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_are_those_of_the_shuffled_stream(
    tmp_path_factory: pytest.TempPathFactory,
    builder: IndexBuilder,
    lengths: list[int],
    seq_length: int,
    num_samples: int,
    seed: int,
) -> None:
    if sum(lengths) <= seq_length:
        return
    folder = tmp_path_factory.mktemp("stream")
    token = iter(range(10000))
    documents = [[next(token) for _ in range(length)] for length in lengths]
    with IndexedWriter(folder / "x", 70000) as writer:
        for document in documents:
            writer.add_document(document)
    source = IndexedDataset(folder / "x")
    expected = reference_samples(documents, seq_length, num_samples, seed)
    assert len(expected) >= num_samples
    everything = range(len(source))
    for cache, either in (("a", builder), ("b", IndexBuilder())):
        indices = build_sample_indices(
            source, everything, seq_length, num_samples, seed, folder / cache, either
        )
        assert all_samples(GPTDataset(source, indices, seq_length, 70000)) == expected


def test_a_split_reads_its_own_documents_only(write_corpus: Write, tmp_path: Path) -> None:
    source = write_corpus(LENGTHS)
    dataset = dataset_of(source, range(3, 6), 4, 25, tmp_path)
    inside = {token for i in range(3, 6) for token in source[i].tolist()}
    seen = {token for sample in all_samples(dataset) for token in sample}
    assert seen <= inside
    assert len(dataset) >= 25


def test_labels_of_one_epoch_are_its_tokens_but_the_first_and_the_cut(
    write_corpus: Write, tmp_path: Path
) -> None:
    source = write_corpus(LENGTHS)
    dataset = dataset_of(source, range(len(source)), 4, 1, tmp_path)
    labels = Counter(token for sample in all_samples(dataset) for token in sample[1:])
    assert set(labels.values()) == {1}
    assert len(labels) == (sum(LENGTHS) - 1) // 4 * 4


def test_a_barely_touched_last_epoch_comes_last(write_corpus: Write, tmp_path: Path) -> None:
    """Every token is seen once in the first epoch's samples before any is seen a second time."""
    source = write_corpus([50] * 20)
    dataset = dataset_of(source, range(20), 10, 105, tmp_path)
    first = Counter(token for sample in all_samples(dataset)[:99] for token in sample[1:])
    assert set(first.values()) == {1}


@given(st.integers(2, 500), st.integers(1, 60), st.integers(1, 400))
def test_epochs_are_just_enough(tokens: int, seq_length: int, num_samples: int) -> None:
    epochs = Epochs.needed(tokens, seq_length, num_samples)
    needed = num_samples * seq_length + 1
    assert epochs.count * tokens >= needed
    assert (epochs.count - 1) * tokens < needed


def test_another_seed_gives_another_order(
    write_corpus: Write, tmp_path: Path, builder: IndexBuilder
) -> None:
    source = write_corpus([40] * 20)
    orders = [
        build_sample_indices(source, range(20), 4, 50, seed, tmp_path, builder).shuffle.tolist()
        for seed in (1, 2, 1)
    ]
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


class Unwanted(IndexBuilder):
    """A builder that must not be needed."""

    def sample_index(self, *_: Any) -> NDArray[Any]:
        raise AssertionError("built although it was cached")


def test_cached_indices_are_found_again_and_not_for_other_data(
    write_corpus: Write, tmp_path: Path, builder: IndexBuilder
) -> None:
    source, everything = write_corpus(LENGTHS), range(len(LENGTHS))
    built = build_sample_indices(source, everything, 4, 10, 1, tmp_path, builder)
    again = build_sample_indices(source, everything, 4, 10, 1, tmp_path, Unwanted())
    for name in ("documents", "samples", "shuffle"):
        np.testing.assert_array_equal(getattr(built, name), getattr(again, name))
    other = write_corpus([*LENGTHS[:-1], 18])
    for source_, sequences, seq_length, seed in (
        (other, everything, 4, 1),
        (source, range(9), 4, 1),
        (source, everything, 5, 1),
        (source, everything, 4, 2),
    ):
        with pytest.raises(AssertionError, match="although it was cached"):
            build_sample_indices(source_, sequences, seq_length, 10, seed, tmp_path, Unwanted())


def test_interrupted_build_is_not_taken_for_a_cache(
    write_corpus: Write, tmp_path: Path, builder: IndexBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = write_corpus(LENGTHS), tmp_path / "cache"
    save, saved = np.save, []

    def interrupted(file: Any, array: np.ndarray) -> None:
        saved.append(array)
        if len(saved) == 2:
            raise KeyboardInterrupt
        save(file, array)

    monkeypatch.setattr(np, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_sample_indices(source, range(10), 4, 10, 1, cache, builder)
    monkeypatch.undo()
    assert [path.name.rsplit("-")[-1] for path in cache.iterdir()] == ["documents.npy"]
    indices = build_sample_indices(source, range(10), 4, 10, 1, cache, builder)
    assert len(indices.shuffle) >= 10


def spoil(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[-1] ^= 1
    elif how == "cut short":
        del content[-8:]
    elif how == "header only":
        del content[min(128, len(content) // 2) :]
    elif how == "empty":
        content.clear()
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["documents.npy", "samples.npy", "shuffle.npy", "checksums.json"])
@pytest.mark.parametrize("how", ["flipped", "cut short", "header only", "empty", "a folder"])
def test_a_damaged_cache_is_named_and_built_anew(
    name: str,
    how: str,
    write_corpus: Write,
    tmp_path: Path,
    builder: IndexBuilder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, cache = write_corpus(LENGTHS), tmp_path / "cache"
    built = build_sample_indices(source, range(10), 4, 10, 1, cache, builder)
    expected = {name: getattr(built, name).tolist() for name in ("documents", "samples", "shuffle")}
    [path] = cache.glob(f"*-{name}")
    if how == "a folder":
        path.unlink()
        path.mkdir()
        with pytest.raises(ValueError, match=rf"^--data-cache-path: cannot write .*{name}"):
            build_sample_indices(source, range(10), 4, 10, 1, cache, builder)
        path.rmdir()
    else:
        spoil(path, how)
    again = build_sample_indices(source, range(10), 4, 10, 1, cache, builder)
    assert {name: getattr(again, name).tolist() for name in expected} == expected
    assert f"{path} " in caplog.text
    assert "built anew" in caplog.text
    build_sample_indices(source, range(10), 4, 10, 1, cache, Unwanted())


def test_a_pickle_in_the_cache_is_named_and_not_read(
    write_corpus: Write, tmp_path: Path, builder: IndexBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    """Its size and checksum are those that are told: somebody has made it on purpose."""

    class Command:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    source, cache = write_corpus(LENGTHS), tmp_path / "cache"
    built = build_sample_indices(source, range(10), 4, 10, 1, cache, builder)
    expected = built.shuffle.tolist()
    [path], [checksums] = cache.glob("*-shuffle.npy"), cache.glob("*.json")
    np.save(path, np.array([Command()], dtype=object))
    told = json.loads(checksums.read_text()) | {"shuffle": checksum(path)}
    checksums.write_text(json.dumps(told))
    again = build_sample_indices(source, range(10), 4, 10, 1, cache, builder)
    assert again.shuffle.tolist() == expected
    assert f"{path} cannot be read" in caplog.text
    assert not (tmp_path / "executed").exists()


def test_a_cache_without_checksums_is_built_anew_without_a_word(
    write_corpus: Write, tmp_path: Path, builder: IndexBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    """It is of an earlier version, or a killed job has left it."""
    source = write_corpus(LENGTHS)
    build_sample_indices(source, range(10), 4, 10, 1, tmp_path / "cache", builder)
    [path] = (tmp_path / "cache").glob("*.json")
    path.unlink()
    build_sample_indices(source, range(10), 4, 10, 1, tmp_path / "cache", builder)
    assert path.exists()
    assert not caplog.text


@pytest.mark.parametrize("num_samples", [10**13, 10**18])
def test_indices_without_room_are_refused_before_they_are_built(
    num_samples: int, write_corpus: Write, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match=r"^--train-it.* indices of [\d,]+ samples take .* GB of .*: ask for fewer"
    ):
        build_sample_indices(
            write_corpus(LENGTHS), range(10), 4, num_samples, 1, tmp_path / "cache", Unwanted()
        )
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_is_told_with_its_folder(
    write_corpus: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(
        ValueError, match=r"0\.0 GB of room left in .*cache, the folder of --data-c"
    ):
        build_sample_indices(
            write_corpus(LENGTHS), range(10), 4, 10, 1, tmp_path / "cache", Unwanted()
        )


def test_unwritable_cache_names_the_way_out(
    write_corpus: Write, tmp_path: Path, builder: IndexBuilder
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"^--data-cache-path: cannot write"):
        build_sample_indices(write_corpus(LENGTHS), range(10), 4, 9, 1, tmp_path / "file", builder)


@pytest.mark.parametrize("sequences", [range(0), range(1, 3), range(1)])
def test_split_too_short_for_one_sample_is_refused(
    write_corpus: Write, tmp_path: Path, builder: IndexBuilder, sequences: range
) -> None:
    source = write_corpus(LENGTHS)
    tokens = sum(LENGTHS[i] for i in sequences)
    with pytest.raises(ValueError, match=rf"^--data-path /.* holds {tokens} tokens, too few"):
        build_sample_indices(source, sequences, 5, 1, 1, tmp_path, builder)


@pytest.mark.parametrize("foreign", [100, -1])
def test_ids_outside_the_vocabulary_are_refused_when_read(tmp_path: Path, foreign: int) -> None:
    np.array([1, 2, foreign, 4], "<i4").tofile(tmp_path / "x.bin")
    with IndexedWriter(tmp_path / "y", 70000) as writer:
        writer.add_document([1, 2, 3, 4])
    (tmp_path / "y.idx").rename(tmp_path / "x.idx")
    indices = SampleIndices(np.array([0]), np.array([[0, 0], [0, 3]]), np.array([0]))
    dataset = GPTDataset(IndexedDataset(tmp_path / "x"), indices, 3, vocab_size=100)
    with pytest.raises(ValueError, match=r"sample 0 holds .* outside the vocabulary of 100"):
        dataset.read(0, np.empty(4, np.int64))
