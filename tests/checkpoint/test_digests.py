"""The digest of a file is the BLAKE3 of its content, however the bytes come and whoever hashes."""

import hashlib
import random
from itertools import pairwise
from pathlib import Path

import pytest
from blake3 import blake3
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint import digests
from megatron.checkpoint.digests import (
    PART,
    FileDigest,
    OlderDigest,
    RunningDigest,
    digest_of,
    threads_of_rank,
)
from megatron.parallel import environment

MOST = 5 * digests._AT_ONCE // 2
CONTENT = random.Random(1).randbytes(MOST)
SIZES = (
    st.integers(0, 200)
    | st.integers(0, MOST)
    | st.integers(0, MOST // PART).map(lambda parts: parts * PART)
)
KNOWN = {
    b"": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    b"abc": "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85",
}
"""Published digests."""


@pytest.mark.parametrize("content", KNOWN)
def test_a_digest_is_the_published_one(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert digest_of(path) == FileDigest(len(content), KNOWN[content])


@settings(max_examples=examples(20))
@given(SIZES, st.lists(st.integers(0, MOST), max_size=5))
def test_a_running_digest_does_not_depend_on_how_the_bytes_come(size: int, cuts: list[int]) -> None:
    content, running = memoryview(CONTENT)[:size], RunningDigest()
    for begin, end in pairwise([0, *sorted(min(cut, size) for cut in cuts), size]):
        running.update(content[begin:end])
        assert running.digest == FileDigest(end, blake3(content[:end]).hexdigest())


@settings(max_examples=examples(15))
@given(SIZES, st.integers(1, 4), st.sampled_from([0, PART]))
def test_a_file_fits_its_digests_of_any_format_for_any_number_of_threads(
    tmp_path_factory: pytest.TempPathFactory, size: int, threads: int, part: int
) -> None:
    path, content = tmp_path_factory.mktemp("file") / "file", CONTENT[:size]
    path.write_bytes(content)
    assert digest_of(path, threads) == FileDigest(size, blake3(content).hexdigest())
    older = OlderDigest(size, plain_sha256(content, part), part)
    assert older.fits(path, threads)
    assert not OlderDigest(size + 1, older.sha256, part).fits(path)
    path.unlink()


def plain_sha256(content: bytes, part: int) -> str:
    """The older digests by their definition."""
    if part:
        each = [content[at : at + part] for at in range(0, len(content), part)]
        content = b"".join(hashlib.sha256(one).digest() for one in each)
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("part", [None, 0, PART])
def test_every_bit_counts(part: int | None, tmp_path: Path) -> None:
    path, draw = tmp_path / "file", random.Random(0)
    for _ in range(10):
        content = bytearray(CONTENT[: draw.randint(1, MOST)])
        path.write_bytes(content)
        before: FileDigest | OlderDigest = digest_of(path)
        if part is not None:
            before = OlderDigest(len(content), plain_sha256(bytes(content), part), part)
        assert before.fits(path)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        assert not before.fits(path)


def test_ranks_of_a_machine_share_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_cores", lambda: 16)
    found = [threads_of_rank({"LOCAL_WORLD_SIZE": str(ranks)}) for ranks in (1, 4, 8, 16, 32)]
    assert found == [4, 4, 2, 1, 1]
    assert threads_of_rank({}) == 4
