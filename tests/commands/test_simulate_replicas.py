"""simulate-schedule with replicas: what they exchange in figures, pictures, text and traces."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.commands.simulate_schedule import main, simulate_schedule

COST = "F=1,B=1,W=1,RG=4,AG=2,U=1"
BOTH = "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather"


def figures(flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    simulate_schedule(["--json", *flags.split()])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_overlaps_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    job = f"--pipeline-schedule interleaved -p 4 -m 8 --replicas 4 --cost {COST}"
    apart = figures(f"{job} --use-distributed-optimizer", capsys)
    beside = figures(f"{job} {BOTH}", capsys)
    alone = figures(job.replace("--replicas 4", "").replace(COST, "F=1,B=1,W=1"), capsys)
    assert alone["hidden"] == {}
    assert apart["hidden"]["RG"] == 0
    assert beside["hidden"] == pytest.approx({"RG": 0.5, "AG": 0.75})
    assert alone["iteration_time"] < beside["iteration_time"] < apart["iteration_time"]


def test_the_link_gives_the_time_of_a_ring(capsys: pytest.CaptureFixture[str]) -> None:
    job = "-p 2 -m 4 --cost F=1,B=2 --replicas 5"
    link = "--parameters 100 --replica-bandwidth 8 --replica-latency 0.25 --buckets 3"
    free = figures("-p 2 -m 4 --cost F=1,B=2", capsys)["iteration_time"]
    whole = figures(f"{job} {link}", capsys)["iteration_time"]
    assert whole - free == pytest.approx(2 * 4 / 5 * 400 / 8 + 3 * 8 * 0.25)
    sharded = figures(f"{job} {link} --use-distributed-optimizer", capsys)["iteration_time"]
    assert sharded - free == pytest.approx(4 / 5 * (400 + 200) / 8 + 2 * 3 * 4 * 0.25)


def test_pictures_text_and_traces_show_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn, trace = tmp_path / "plan.svg", tmp_path / "trace.json"
    flags = f"-p 2 -m 4 --replicas 2 --cost {COST} {BOTH} --text --draw {drawn} --trace {trace}"
    simulate_schedule(flags.split())
    text = capsys.readouterr().out
    for word in ("U update of a bucket", "RG reduction over replicas", "AG gathering from"):
        assert word in " ".join(text.split())
        assert word in drawn.read_text()
    assert "m = 4, d = 2: time" in text
    rows = [line for line in text.splitlines() if line.startswith(" ") and "G0" in line]
    assert any("AG0" in row for row in rows)
    assert any("RG0" in row for row in rows)
    events = json.loads(trace.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for rank in range(2):
        own = [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["cat"] == "comm"]
        exchanged = [e for e in own if e["args"]["kind"] in ("RG", "AG")]
        assert {e["name"] for e in exchanged} == {f"RG 0 of {rank}", f"AG 0 of {rank}"}
        assert {names[rank, e["tid"]] for e in exchanged} == {"communication: replicas"}
        updates = [e for e in events if e["ph"] == "X" and e["name"] == "U0" and e["pid"] == rank]
        assert [names[rank, e["tid"]] for e in updates] == ["compute"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--replicas 4", "--replicas 4: give the time of RG"),
        ("--buckets 3", "--buckets is about replicas"),
        ("--use-distributed-optimizer", "--use-distributed-optimizer is about replicas"),
        ("--replicas 4 --parameters 1e9", "needs both --parameters and --replica-bandwidth"),
        ("--replicas 4 --cost F=1,B=1,RG=2:3", "RG has 2 times for 4 ranks"),
        ("--replicas 4 --cost F=1,B=1,RG=2 --parameters 9 --replica-bandwidth 9", "time of RG"),
        ("--replicas 0", "--replicas 0: must be at least 1"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags.split())
    printed = capsys.readouterr().err + str(ended.value)
    assert message in printed
    assert len(printed.splitlines()) <= 2
