"""tools/simulate.py as users run it: what it prints, what it writes, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan

TOOL = Path(__file__).resolve().parents[2] / "tools/simulate.py"
KEYS = [
    *("schedule", "taken", "vocab", "p", "m", "slices", "replicas", "iteration_time", "idle"),
    *("bubble_rate", "peak_in_flight", "peak_bytes", "hidden", "rows"),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def figures(*arguments: str) -> dict[str, Any]:
    done = run("--json", *arguments)
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def test_1f1b_takes_the_time_of_the_textbook() -> None:
    """With F = 1 and B = 2 on every rank: m + p - 1 slots of 3, of which p - 1 are idle."""
    p, m = 4, 8
    found = figures("-p", str(p), "-m", str(m), "--cost", "F=1,B=2")
    assert list(found) == KEYS
    assert found["iteration_time"] == pytest.approx(3 * (m + p - 1))
    assert found["idle"] == pytest.approx((p - 1) / (m + p - 1))
    assert found["peak_in_flight"] == [4, 3, 2, 1]
    assert found["peak_bytes"] is None
    assert [found[key] for key in ("schedule", "vocab", "p", "m")] == ["1f1b", "none", p, m]
    rows = [" ".join(map(str, row)) for row in make_plan("1f1b", "none", p, m).rows]
    assert found["rows"] == rows


def test_a_message_delays_the_next_stage_by_its_time() -> None:
    """One microbatch over three ranks: all passes and four messages in a row."""
    found = figures("-p", "3", "-m", "1", "--cost", "F=3:5:7,B=11,p2p=0.5")
    assert found["iteration_time"] == pytest.approx(3 + 5 + 7 + 3 * 11 + 4 * 0.5)


def test_costs_from_a_file_and_bytes(tmp_path: Path) -> None:
    """Of 1F1B on two ranks the first holds two microbatches, the last one."""
    file = tmp_path / "costs.json"
    sizes = {"static": [1000, 2000], "activation": 10}
    file.write_text(json.dumps({"passes": {"F": [1, 2], "B": 4}, "bytes": sizes}))
    found = figures("-p", "2", "-m", "2", "--measured-costs", str(file))
    assert found["iteration_time"] == pytest.approx(1 + 2 * (2 + 4) + 4)
    assert found["peak_bytes"] == [1020, 2010]
    assert "GiB" in run("-p", "2", "-m", "2", "--measured-costs", str(file)).stdout


def test_zb_h2_has_no_bubble_and_yet_idles() -> None:
    """On average a rank waits for (p - 1) / 2 forwards and as much again at the end."""
    heading, *_, bubble = run("--pipeline-schedule", "zb-h2", "-p", "4").stdout.splitlines()
    assert heading.endswith(f": time 27, idle {3 / 27:.1%}, 7 microbatches in flight")
    assert bubble.endswith(": 0.0%")


def test_measured_costs_of_another_treatment_are_refused(tmp_path: Path) -> None:
    """Those written by hand may leave out what takes no time; measurements have layers."""
    file = tmp_path / "costs.json"
    costs = {"passes": {"F": 1, "B": 2}}
    for layers, status in ({}, 0), ({"layers": [[1], [1]]}, 1):
        file.write_text(json.dumps(costs | layers))
        done = run(
            "-p", "2", "-m", "2", "--vocab-parallel", "vocab-2", "--measured-costs", str(file)
        )
        assert done.returncode == status
    assert done.stderr.startswith(
        f"error: --measured-costs: {file}: these costs were not measured with"
    )


def test_everything_at_once_prints_one_object_and_writes_files(tmp_path: Path) -> None:
    svg, trace, plan = tmp_path / "a.svg", tmp_path / "a.json", tmp_path / "a.txt"
    options = [
        "--pipeline-schedule",
        "zb-v",
        "--vocab-parallel",
        "vocab-2",
        "-p",
        "3",
        "--json",
        "--text",
    ]
    files = ["--draw", str(svg), "--trace", str(trace), "--save-plan", str(plan)]
    done = run(*options, "--json", "--text", *files)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    drawn = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert drawn == ["0", "1", "2"] * (len(drawn) // 3) != []
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    events = json.loads(trace.read_text())["traceEvents"]
    passes = [event for event in events if event.get("cat") == "compute"]
    assert len(passes) == sum(len(row.split()) for row in rows)
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert [" ".join(map(str, row)) for row in Plan.from_text(plan.read_text()).rows] == rows
    loaded = figures("--schedule-file", str(plan))
    assert loaded["rows"] == rows


def test_the_report_for_people() -> None:
    lines = run("--vocab-parallel", "vocab-2", "-p", "3", "--text").stdout.splitlines()
    assert lines[0].startswith("1f1b, vocabulary vocab-2, p = 3, m = 8: time ")
    found = figures("--vocab-parallel", "vocab-2", "-p", "3")
    assert f", idle {found['idle']:.1%}, " in lines[0]
    assert f"  bubble of the zero-bubble papers: {found['bubble_rate']:.1%}" in lines
    assert sum(line.startswith("  rank ") for line in lines) == 3
    drawn = [line.split()[1] for line in lines if line.startswith("rank ")]
    assert drawn == ["0", "1", "2"] * (len(drawn) // 3) != []
    assert "S output layer before its barrier" in " ".join(lines)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--cost", "Q=1"], 1, "--cost: 'Q' is no communication, nor a pass"),
        (["--cost", "F"], 1, "--cost: 'F' is no cost"),
        (["--cost", "F=-1,B=2"], 1, "--cost: F=-1 is no cost"),
        (["--cost", "F=nan,B=2"], 1, "--cost: F=nan is no cost"),
        (["--cost", "F=1:2,B=1"], 1, "F has 2 times for 4 ranks"),
        (
            ["--cost", "F=1,B=2", "--pipeline-schedule", "zb-v"],
            1,
            "the costs have no W: give W=TIME",
        ),
        (["--measured-costs", "/no/such.json"], 1, "--measured-costs: cannot read /no/such.json"),
        (["--cost", "F=1,B=1,S=1", "--output-layer", "2"], 1, "--output-layer 2 and the costs of"),
        (["--vocab-recompute"], 2, "adds to the time of the output layer: add --output-layer, or"),
        (["--draw", "/no/such/folder/a.svg"], 1, "cannot write /no/such/folder/a.svg: No"),
        (["--pipeline-schedule", "zb-auto"], 1, "give it a memory limit"),
        (
            ["--pipeline-schedule", "zb-h1", "--zero-bubble-max-pending-backward", "2"],
            1,
            "memory limit of 2: raise it to that",
        ),
        (
            ["--cost", "F=1,B=1", "--measured-costs", "x"],
            2,
            "F=1,B=1 does not go with --measured-costs x: give",
        ),
        (["--window", "1:2"], 2, "--window 1:2 is the part to draw: add --text or --draw, or"),
        (["--window", "2:1", "--text"], 2, "--window 2:1: give FROM:TO"),
        (["--draw", "a.gif"], 2, "--draw a.gif: end it in .svg"),
        (["--output-layer", "big"], 2, "--output-layer big: must be a number"),
        (
            ["--zero-bubble-max-pending-backward", "nan"],
            2,
            "--zero-bubble-max-pending-backward nan: must be at least 1",
        ),
        (
            ["-p", "0"],
            2,
            "--pipeline-model-parallel-size 0: must be at least 1",
        ),
        (["-m", "2.5"], 2, "--microbatches 2.5: must be a whole number"),
        (
            ["--pipeline-schedule", "dualpipe"],
            2,
            "--pipeline-schedule dualpipe: did you mean dualpipe-v? choose one of gpipe, 1f1b",
        ),
    ],
)
def test_what_makes_no_simulation_is_refused_in_one_line(
    arguments: list[str], status: int, message: str
) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_auto_says_what_it_takes() -> None:
    """Costs for auto are those of all chunks of a rank, and for the schedule by itself of one."""
    options = ["--vocab-parallel", "vocab-2", "-p", "2", "-m", "6"]
    cost = "F={0},B={0},W={0},S=1,T=1"
    found = figures("--pipeline-schedule", "auto", *options, "--cost", cost.format(1))
    share = 1 / SCHEDULES[found["taken"]].chunks
    options += ["--cost", cost.format(share)]
    named = figures("--pipeline-schedule", found["taken"], *options)
    assert found["rows"] == named["rows"]
    assert named["taken"] == named["schedule"]
    heading = run("--pipeline-schedule", "auto", *options).stdout.splitlines()[0]
    assert heading.startswith(
        f"auto takes {found['taken']}, vocabulary vocab-2, p = 2, m = 6: time "
    )


def test_logits_computed_again_take_the_output_layers_time_once_more() -> None:
    options = ["--vocab-parallel", "vocab-2", "-p", "2", "-m", "1", "--output-layer", "4"]
    times = [figures(*options, *more)["iteration_time"] for more in ([], ["--vocab-recompute"])]
    assert times[1] == pytest.approx(times[0] + 4 / 2)


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ([], True),
        (["--num-layers", "16"], True),
        (["--output-layer", "2"], False),
        (["--cost", "F=1:1:1:2,B=2:2:2:4"], False),
    ],
)
def test_redis_without_an_output_layer_is_told_to_be_none(options: list[str], noted: bool) -> None:
    done = run("--vocab-parallel", "redis", *options)
    assert done.returncode == 0, done.stderr
    assert ("note: --vocab-parallel redis " in done.stdout) is noted
    plain = run(*(options if "--cost" in options else []))
    same = done.stdout.split(": ")[1].split("\n")[0] == plain.stdout.split(": ")[1].split("\n")[0]
    assert same is (noted or "--cost" in options)


def test_all_that_does_not_fit_a_file_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "my.plan"
    file.write_text(make_plan("1f1b", "vocab-1", 2, 3).to_text())
    done = run("--schedule-file", str(file), "-p", "3", "-m", "1", "--vocab-parallel", "none")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error:",
        f"{file} is a plan for 2 ranks, not 3 ranks: ask for 2 ranks, or give another file",
        f"{file} is a plan for 3 microbatches, not 1 microbatch: ask for 3 microbatches, or give "
        "another file",
        f"{file} is a plan for the vocabulary treatment vocab-1, not none: ask for vocab-1, or "
        "give another file",
    ]


def test_a_reader_may_stop_early() -> None:
    command = [sys.executable, "-u", str(TOOL), "--text"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_plan_with_a_doubled_pass_is_shown_with_the_pass_marked(tmp_path: Path) -> None:
    file = tmp_path / "plan.txt"
    file.write_text("microbatches 1\nstages 0.0 1.0\nvocabulary none\n0: F0 B0\n1: F0 F0 B0\n")
    done = run("--schedule-file", str(file))
    assert done.returncode == 1
    assert done.stderr.startswith("error:\n")
    assert "rank 1 runs F0 twice" in done.stderr
    assert ">F0<" in done.stderr
