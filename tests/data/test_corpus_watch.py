"""What the checks of corpora cost: few pieces of many files, and a hundredth of the time."""

import os
import time
from pathlib import Path

import pytest

from megatron.data.corpus_watch import CorpusWatch
from megatron.training.guard.data_watch import DataWatch


@pytest.mark.parametrize(("files", "compared"), [(3, 3), (300, 256), (1000, 256)])
def test_a_check_of_many_files_reads_512_pieces_at_most(
    files: int, compared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / str(number) for number in range(files)]
    for path in paths:
        path.write_bytes(bytes(64))
    read: set[int] = set()
    pieces, pread = [0], os.pread

    def counted(file: int, size: int, offset: int) -> bytes:
        pieces[0] += 1
        read.add(os.fstat(file).st_ino)
        return pread(file, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    watch = CorpusWatch(paths)
    assert watch.check() == []
    assert not read  # only ranks that compare content read it
    for work in (watch.compare_content, watch.check):
        read.clear()
        pieces[0] = 0
        work()
        assert len(read) == compared
        assert pieces[0] <= 512
    paths[0].write_bytes(bytes([1] * 64))
    with pytest.raises(ValueError, match="has other content"):
        watch.check()


def test_slow_checks_are_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def check(_: CorpusWatch) -> list[str]:
        now[0] += 3
        return []

    monkeypatch.setattr(CorpusWatch, "check", check)
    watch = DataWatch(CorpusWatch((), 100), print)
    assert not watch.is_due(0)
    now[0] = 10
    assert watch.is_due(100)
    watch.check()
    now[0] = 13 + 299
    assert not watch.is_due(200)
    now[0] = 13 + 300
    assert watch.is_due(300)
