"""Both builders against definitions written token by token, and what serves without a compiler."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data import index_builder
from megatron.data.blend import normalised
from megatron.data.index_builder import IndexBuilder, load_index_builder
from megatron.native.extensions import INDEX_BUILDER


@pytest.fixture(scope="module", params=["numpy", "compiled"])
def either(request: pytest.FixtureRequest, builder: IndexBuilder) -> IndexBuilder:
    return IndexBuilder() if request.param == "numpy" else builder


@given(st.data())
def test_sample_starts_are_where_counting_tokens_puts_them(
    either: IndexBuilder, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    order = data.draw(st.permutations(range(len(lengths))))
    seq_length = data.draw(st.integers(1, 7))
    tokens = [(place, k) for place, doc in enumerate(order) for k in range(lengths[doc])]
    num_samples = (len(tokens) - 1) // seq_length
    if num_samples < 1:
        return
    index = either.sample_index(
        np.array(lengths, np.int32), np.array(order, np.int32), seq_length, num_samples
    )
    assert index.dtype == np.int64
    assert index.tolist() == [list(tokens[i * seq_length]) for i in range(num_samples + 1)]


@given(
    weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    size=st.integers(0, 200),
)
def test_blend_goes_to_the_one_furthest_behind(
    either: IndexBuilder, weights: list[float], size: int
) -> None:
    shares = normalised(weights)
    dataset, within = either.blend_index(shares, size)
    drawn = [0] * len(weights)
    for step in range(size):
        behind = [float(share) * max(step, 1) - n for share, n in zip(shares, drawn, strict=True)]
        best = behind.index(max(behind))
        assert (dataset[step], within[step]) == (best, drawn[best])
        drawn[best] += 1


@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=8))
def test_every_prefix_of_a_blend_holds_its_weights(
    either: IndexBuilder, weights: list[float]
) -> None:
    shares = normalised(weights)
    dataset, _ = either.blend_index(shares, 300)
    counts = np.cumsum(dataset[:, None] == np.arange(len(weights)), axis=0)
    ideal = np.arange(1, 301)[:, None] * shares
    assert np.abs(counts - ideal).max() < len(weights)


def test_builders_agree_at_scale(builder: IndexBuilder) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(0, 3000, 20000).astype(np.int32)
    order = random.integers(0, 20000, 50000).astype(np.int32)
    num_samples = (int(lengths[order].sum()) - 1) // 511
    one = builder.sample_index(lengths, order, 511, num_samples)
    two = IndexBuilder().sample_index(lengths, order, 511, num_samples)
    np.testing.assert_array_equal(one, two)
    shares = normalised(random.random(7).tolist())
    mine, plain = builder.blend_index(shares, 5000), IndexBuilder().blend_index(shares, 5000)
    for ours, theirs in zip(map(np.asarray, mine), map(np.asarray, plain), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_a_compiler_at_hand_is_used(builder: IndexBuilder) -> None:
    assert not isinstance(builder, IndexBuilder)


@pytest.fixture
def not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source lies where no installation has put its module."""
    copied = Path(shutil.copy(INDEX_BUILDER.source, tmp_path))
    monkeypatch.setattr(index_builder, "INDEX_BUILDER", replace(INDEX_BUILDER, source=copied))


@pytest.mark.usefixtures("not_installed")
def test_without_a_compiler_numpy_serves_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert isinstance(load_index_builder(tmp_path), IndexBuilder)
    assert "built in NumPy" in caplog.text
    assert "no C++ compiler" in caplog.text


@pytest.mark.usefixtures("not_installed")
def test_a_failing_compiler_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'Python.h: no such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    cache = tmp_path / "cache"
    assert isinstance(load_index_builder(cache), IndexBuilder)
    assert "Python.h: no such file" in caplog.text
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
