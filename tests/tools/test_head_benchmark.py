"""The benchmark of the head: every way has the same loss, and memory is what a way holds."""

import pytest

from tools import head_benchmark
from tools.head_benchmark import EVERY, WHOLE, measure, parse_arguments, report, ways

SIZES = [
    *("--tokens", "256", "--hidden-size", "16", "--dtype", "float32"),
    *("--rounds", "1", "--threads", "1"),
]


@pytest.mark.full
def test_every_way_has_the_same_loss_and_recomputing_holds_less() -> None:
    found = {
        (way, ranks): measure(SIZES, way, ranks, 20_001, on_cpu=True)
        for way, ranks in ways(EVERY, 2)
    }
    expected = found["F.cross_entropy", 1]
    assert all(own.loss == pytest.approx(expected.loss, rel=1e-5) for own in found.values())
    assert all(len(own.seconds) == 1 and own.seconds[0] > 0 for own in found.values())
    exponentials = 4 * 256 * 20_001
    kept, again = (found["VocabParallelHead" + how, 1].bytes for how in ("", ", recompute"))
    assert kept - again > 0.5 * exponentials
    assert kept - found["VocabParallelHead", 2].bytes > 0.3 * exponentials
    assert kept < expected.bytes


def test_ways_are_those_of_pytorch_and_ours() -> None:
    names = [way for way, _ in ways(EVERY, 3)]
    assert names[0] == "F.cross_entropy"
    assert {ranks for way, ranks in ways(EVERY, 3) if way in WHOLE} == {1}
    assert [ranks for way, ranks in ways(EVERY, 3) if way == "VocabParallelHead"] == [1, 3]


def test_chosen_ways_alone_are_measured() -> None:
    chosen = parse_arguments(["--only", "VocabParallelHead"]).only
    assert list(ways(chosen, 2)) == [("VocabParallelHead", 1), ("VocabParallelHead", 2)]


def test_a_report_has_a_row_for_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object, **__: object) -> head_benchmark.Found:
        return head_benchmark.Found([0.2, 0.1, 0.4], 0.5, 3e6, 9.25)

    monkeypatch.setattr(head_benchmark, "measure", measured)
    argv = ["--vocab-sizes", "32k,1001"]
    raw: list[dict[str, object]] = []
    lines = list(report(parse_arguments(argv), argv, raw))
    rows = [line for line in lines if line.startswith("| 32000") or line.startswith("| 1001")]
    assert len(rows) == 2 * len(list(ways(EVERY, 2)))
    assert rows[0] == "| 32000 | F.cross_entropy | 1 | 0.200 (0.100 to 0.400) | 0.50 | 3 | 9.2500 |"
    assert [own["V"] for own in raw] == [32000] * (len(raw) // 2) + [1001] * (len(raw) // 2)
    assert raw[0]["seconds"] == [0.2, 0.1, 0.4]


@pytest.mark.parametrize(
    "words", ["--tokens 0", "--ranks 0", "--rounds 0", "--vocab-sizes 32k,0", "--vocab-sizes x"]
)
def test_sizes_of_nothing_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag, value = words.split()
    with pytest.raises(SystemExit, match="2"):
        parse_arguments([flag, value])
    told = capsys.readouterr().err
    assert told.startswith(f"error: {flag} {value}: ")
    assert "at least 1" in told
