"""Digests of parts are those of hashlib, however the bytes come and whoever forms them."""

import hashlib
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint import digests
from megatron.checkpoint.digests import (
    PART,
    FileDigest,
    RunningDigest,
    digest_of,
    hash_parts,
    threads_of_rank,
)
from megatron.native.extensions import PART_DIGESTS, load_extension
from megatron.native.files import cache_root

MOST = 35 * PART
CONTENT = random.Random(1).randbytes(MOST)
SIZES = st.integers(0, MOST) | st.integers(0, MOST // PART).map(lambda parts: parts * PART)


def plain(content: bytes) -> FileDigest:
    """The digest by its definition."""
    each = [content[at : at + PART] for at in range(0, len(content), PART)]
    of_parts = b"".join(hashlib.sha256(part).digest() for part in each)
    return FileDigest(len(content), hashlib.sha256(of_parts).hexdigest(), PART)


@settings(max_examples=examples(40))
@given(SIZES, st.booleans())
def test_parts_are_those_of_hashlib(size: int, compiled: bool) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if not compiled:
            patched.setattr(digests, "_library", lambda: None)
        found = hash_parts(memoryview(CONTENT)[:size])
    assert hashlib.sha256(found).hexdigest() == plain(CONTENT[:size]).sha256


def test_threads_that_begin_together_load_the_compiled_function_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python may fail where two threads load a module at once."""
    loading, most = [0], [0]

    def load(*_: object) -> ModuleType:
        loading[0] += 1
        most[0] = max(most[0], loading[0])
        time.sleep(0.05)
        loading[0] -= 1
        return hashlib

    monkeypatch.setattr(digests, "load_extension", load)
    monkeypatch.setattr(hashlib, "LANES", 16, raising=False)
    digests._loaded.cache_clear()
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: digests._library(), range(4)))
    finally:
        digests._loaded.cache_clear()
    assert found == [hashlib] * 4
    assert most == [1]


@pytest.mark.parametrize("part", [64, 128, 4096, 1 << 16, 1 << 20])
def test_lanes_of_a_processor_hash_as_hashlib_does(part: int) -> None:
    library = load_extension(PART_DIGESTS, cache_root())
    if library.LANES == 1:
        pytest.skip("this processor has no registers of 512 bits")
    content = random.Random(part).randbytes(2 * part * library.LANES)
    parts = [content[at : at + part] for at in range(0, len(content), part)]
    expected = b"".join(hashlib.sha256(each).digest() for each in parts)
    assert library.digests(content, part) == expected
    for wrong in (part - 1, 0, -64, part * 4):
        with pytest.raises(ValueError, match="no multiple"):
            library.digests(content, wrong)


@settings(max_examples=examples(20))
@given(SIZES, st.lists(st.integers(0, MOST), max_size=5), st.integers(1, 4))
def test_a_running_digest_does_not_depend_on_how_the_bytes_come(
    size: int, cuts: list[int], threads: int
) -> None:
    content, running = memoryview(CONTENT)[:size], RunningDigest()
    ends = [0, *sorted(min(cut, size) for cut in cuts), size]
    with ThreadPoolExecutor(threads) as pool:
        for begin, end in pairwise(ends):
            running.update(content[begin:end], threads, pool.map)
            assert running.digest == plain(CONTENT[:end])


@settings(max_examples=examples(15))
@given(SIZES, st.integers(1, 4))
def test_a_file_has_one_digest_for_any_number_of_threads(
    tmp_path_factory: pytest.TempPathFactory, size: int, threads: int
) -> None:
    path = tmp_path_factory.mktemp("file") / "file"
    path.write_bytes(CONTENT[:size])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(digests, "_RANGE", 1 << 20)  # so that there are several
        assert digest_of(path, PART, threads) == plain(CONTENT[:size])
    older = FileDigest(size, hashlib.sha256(CONTENT[:size]).hexdigest())
    assert digest_of(path, 0, threads) == older
    shutil.rmtree(path.parent)


def test_every_bit_counts(tmp_path: Path) -> None:
    path, draw = tmp_path / "file", random.Random(0)
    for _ in range(10):
        content = bytearray(CONTENT[: draw.randint(1, MOST)])
        before = plain(bytes(content))
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        assert digest_of(path) != before


def test_ranks_of_a_machine_share_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_cores", lambda: 16)
    found = [threads_of_rank({"LOCAL_WORLD_SIZE": str(ranks)}) for ranks in (1, 4, 8, 16, 32)]
    assert found == [4, 4, 2, 1, 1]
    assert threads_of_rank({}) == 4
