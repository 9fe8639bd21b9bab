"""The explorer's answers are the commands' own: same numbers, pictures, checks and refusals."""

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron.commands.exploring.interface import answer, pareto_front
from megatron.commands.exploring.simulated import Simulations
from megatron.commands.simulate_schedule import main as simulate_schedule
from megatron.schedules.needs import Comm, needs, sources
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.simulator.simulate import Span, Timeline
from megatron.simulator.timeline_file import save_timeline
from tools.explorer_cases import CASES, SMALL_MODEL

SIMULATIONS = Simulations()
"""Shared, so that a case that several tests look at is searched once."""


def ask(action: str, **values: object) -> dict[str, Any]:
    """Return an answer as the page gets it, through JSON text."""
    request = json.dumps({"action": action, **values})
    found: dict[str, Any] = json.loads(answer(request, SIMULATIONS))
    return found


def refusal(action: str, **values: object) -> str:
    message = ask(action, **values)["error"]
    assert isinstance(message, str)
    return message


def run_command(
    words: str, found: Mapping[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the command that the page shows, in a folder with the files that it offers."""
    monkeypatch.chdir(folder)
    (folder / "my.plan").write_text(found["plan"])
    (folder / "costs.json").write_text(json.dumps(found["costs_file"]))
    python, tool, *flags = shlex.split(words)
    assert (python, tool) == ("python", "tools/simulate.py")
    simulate_schedule(flags)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_the_command_that_is_shown_prints_the_same_json(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask("simulate", case=CASES[name])
    run_command(found["command"] + " --json", found, tmp_path, monkeypatch)
    printed = json.loads(capsys.readouterr().out)
    if "model" in CASES[name]:  # a file of costs has none of its memory
        found["figures"]["peak_bytes"] = None
    assert printed == found["figures"]


@pytest.mark.parametrize("name", ["usual", "of its ranks", "recomputed", "in pairs"])
def test_the_picture_is_that_of_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, svg = ask("simulate", case=CASES[name]), ask("draw", case=CASES[name])["svg"]
    run_command(found["command"] + " --draw plan.svg", found, tmp_path, monkeypatch)
    assert (tmp_path / "plan.svg").read_text() == svg


def row_text(passes: Sequence[Sequence[Any]]) -> str:
    """Return the row of a plan from the passes that are drawn, with ``|`` within a pair."""
    words, beside = "", ""
    for kind, microbatch, chunk, _, _, *rest in passes:
        if kind != "U":
            name = str(Pass(kind, microbatch, chunk, *rest[:1]))
            words += f"{'|' if name == beside else ' '}{name}"
            beside = rest[1] if kind == "F" and len(rest) > 1 else ""
    return words.strip()


@pytest.mark.parametrize("name", CASES)
def test_what_is_drawn_has_the_figures(name: str) -> None:
    """Time, idle share and peaks can be read off the passes and the memory that the page draws."""
    found = ask("simulate", case=CASES[name])
    figures, ranks = found["figures"], found["drawing"]["ranks"]
    passes = [rank["passes"] for rank in ranks]
    end = max(span[4] for rank in ranks for span in (*rank["passes"], *rank["comms"]))
    assert end == pytest.approx(figures["iteration_time"])
    work = sum(span[4] - span[3] for row in passes for span in row)
    assert 1 - work / (len(ranks) * end) == pytest.approx(figures["idle"])
    assert list(map(row_text, passes)) == figures["rows"]
    peaks = [max(held for _, held in steps) for steps in found["memory"]]
    assert peaks == pytest.approx(figures["peak_bytes"] or figures["peak_in_flight"])
    for steps in found["memory"]:
        assert all(before[0] <= after[0] for before, after in pairwise(steps))


def test_all_that_is_held_is_given_back() -> None:
    for case in ("usual", "two barriers", "on the ends"):
        for steps in ask("simulate", case=CASES[case])["memory"]:
            assert steps[-1][1] == pytest.approx(0.0)


@pytest.mark.parametrize("name", ["usual", "two barriers", "interlaced", "recomputed", "sliced"])
def test_needs_of_the_first_microbatch_are_those_of_all(name: str) -> None:
    found = ask("simulate", case=CASES[name])
    plan, shown = Plan.from_text(found["plan"]), found["needs"]
    for rank, row in enumerate(plan.rows):
        told = {(own["kind"], own["chunk"], own["slice"]): own for own in shown[rank]}
        for item in row:
            expected = set()
            for need in needs(plan, rank, item):
                of = sources(plan, need) if isinstance(need, Comm) else ((rank, need),)
                expected |= {(at, each) for at, each in of}
            own = told[item.kind, item.chunk, item.slice]
            i = item.microbatch
            drawn = {(rank, Pass(kind, i, *place)) for kind, *place in own["own"]}
            for comm in own["comms"]:
                drawn |= {(at, Pass(kind, i, *place)) for at, kind, *place in comm["from"]}
            assert drawn == expected


def test_every_schedule_does_the_same_work() -> None:
    """Costs are of all chunks of a rank together, so that time and idle share can be compared."""
    facts = ask("facts")
    points = [
        ask("point", schedule=schedule, case={"p": 3, "m": 4, "output": 1.2, "limit": 4})
        for schedule in facts["schedules"]
    ]
    works = [point["time"] * (1 - point["idle"]) for point in points]
    assert works == pytest.approx([works[0]] * len(works))
    assert [point["schedule"] for point in points] == [*facts["schedules"]]


def test_a_compared_schedule_is_what_is_shown_when_it_is_chosen() -> None:
    point = ask("point", schedule="zb-v", case={"m": 6, "output": 1.2, "split": True})
    figures = ask("simulate", case={"schedule": "zb-v", "m": 6, "output": 1.2})["figures"]
    assert (point["time"], point["idle"]) == (figures["iteration_time"], figures["idle"])
    assert point["memory"] == max(figures["peak_in_flight"])


def test_the_front_has_what_cannot_be_beaten() -> None:
    assert pareto_front([(1, 5), (2, 3), (3, 3), (4, 1), (4, 2), (1, 5)]) == [0, 1, 3, 5]
    points = [{"time": 2, "memory": 2}, {"time": 1, "memory": 1}]
    assert ask("front", points=points) == {"front": [1]}


def edited(plan: str, rank: int, one: str, other: str) -> str:
    """Return a plan in which two passes of a rank have changed places."""
    lines = plan.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{rank}:"))
    swap = {one: other, other: one}
    lines[at] = " ".join(swap.get(word, word) for word in lines[at].split())
    return "\n".join(lines) + "\n"


def test_an_edited_plan_is_simulated_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES["usual"]
    before = ask("simulate", case=case)
    plan = edited(before["plan"], 0, "F0", "F1")
    after = ask("simulate", case={**case, "plan": plan})
    assert after["figures"]["iteration_time"] > before["figures"]["iteration_time"]
    assert Plan.from_text(after["plan"]) == Plan.from_text(plan)
    run_command(after["command"] + " --json", after, tmp_path, monkeypatch)
    assert json.loads(capsys.readouterr().out) == after["figures"]


def test_an_edited_plan_that_cannot_run_is_refused_by_name() -> None:
    plan = ask("simulate", case=CASES["usual"])["plan"]
    late = edited(plan, 0, "F0", "B7")
    assert "the plan deadlocks: rank 0 waits at B7" in refusal("simulate", case={"plan": late})
    twice = plan.replace(" F0 ", " F1 ", 1)
    assert "rank 0 runs F1 twice" in refusal("simulate", case={"plan": twice})
    circle = plan.replace(" F0 ", " F0|B0 ", 1).replace(" B0 ", " ", 1)
    assert "rank 0 cannot join F0 and B0" in refusal("simulate", case={"plan": circle})
    unknown = plan.replace(" F0 ", " Q0 ", 1)
    message = refusal("simulate", case={"plan": unknown})
    assert message.startswith("the plan: line 4: 'Q0' is no pass")


def test_pairs_hide_what_passes_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan with pairs is shorter; pairs that are taken apart by hand make it longer again."""
    case = CASES["in pairs"]
    found = ask("simulate", case=case)
    alone = ask("simulate", case={**case, "joined": False})
    assert "|" not in alone["plan"]
    times = {}
    for name, text in (("pairs", found["plan"]), ("parted", found["plan"].replace("|", " "))):
        again = ask("simulate", case={**case, "joined": False, "plan": text})
        assert "--overlap-moe-expert-parallel-comm" not in again["command"]
        run_command(again["command"] + " --json", again, tmp_path, monkeypatch)
        assert json.loads(capsys.readouterr().out) == again["figures"]
        times[name] = again["figures"]["iteration_time"]
    assert times["pairs"] == pytest.approx(found["figures"]["iteration_time"])
    assert times["pairs"] < min(times["parted"], alone["figures"]["iteration_time"])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"schedule": "optimal"}, "schedule optimal: the page shows"),
        ({"vocab": "half"}, "unknown vocabulary treatment 'half'"),
        ({"p": 0}, "at least 1 rank"),
        ({"p": "4"}, "p is '4', which cannot be"),
        ({"p": True}, "p is 'True', which cannot be"),
        ({"pp": 4}, "a case has no 'pp'"),
        ({"p": 200, "m": 4000}, "more than the 250,000"),
        ({"costs": "F=1,B"}, "'B' is no cost"),
        ({"costs": "F=1,B=1,S=1", "output": 1}, "both give its time"),
        ({"again": True}, "adds to the output layer's time"),
        ({"schedule": "zb-auto"}, "give it a memory limit"),
        ({"schedule": "zb-v", "costs": "F=1,B=2"}, "the costs have no W"),
        ({"model": {"gpu": "H900"}}, "the GPU H900 is not known: choose one of A100"),
        ({"model": {"heads": 7}}, "7 heads must divide"),
        ({"model": {"layers": 2}}, "2 layers are fewer than the 4 stages"),
        ({"joined": True, "model": SMALL_MODEL}, "the models here are dense: take costs by hand"),
        ({"waits": "S=1"}, "'S' does not wait"),
        ({"waits": "F=2"}, "F takes 1 and waits 2 of it"),
        ({"model": 3}, "model is '3', which cannot be"),
        ({"schedule": "auto", "model": SMALL_MODEL}, "auto needs costs that hold for all"),
        ({"schedule": "auto", "vocab": "none", "output": 1}, "'auto' compares schedules whose"),
        ({"replicas": {}}, "2 replicas reduce their gradients: give the time of RG"),
        ({"replicas": {"count": 1}, "costs": "F=1,B=1,W=1,RG=1"}, "1 replicas: give 2 to 10^6"),
        ({"replicas": {"buckets": 65}}, "65 buckets of a chunk: give 1 to 64"),
        ({"replicas": {"d": 2}}, "'replicas' has no 'd': it has count"),
        ({"replicas": {}, "costs": "F=1,B=1,W=1,RG=1:2:3"}, "RG has 3 times for 4 ranks"),
        ([], "a case is []"),
    ],
    ids=str,
)
def test_refusals(case: object, message: str) -> None:
    assert message in refusal("simulate", case=case)


def test_requests_that_are_none_are_refused() -> None:
    assert "ask for one of" in refusal("guess")
    assert "needs 'case'" in refusal("simulate")
    for action in (["facts"], {"facts": 1}, None, 5, "FACTS"):
        request = json.dumps({"action": action})
        told = json.loads(answer(request, Simulations()))["error"]
        assert told.startswith("ask for one of facts, simulate,")
    for points in (5, [1], [{"time": 1}], [{"time": [], "memory": 1}]):
        assert "each of 'points' needs its 'time'" in refusal("front", points=points)
    assert "schedule x: the page shows" in refusal("point", case={}, schedule="x")
    for text in ("no JSON", "3", "[" * 100_000):
        assert "error" in json.loads(answer(text, Simulations()))


def timeline_of(found: Mapping[str, Any], factor: float) -> Timeline:
    """Return the timeline that is drawn, with every time so many times as long."""
    spans = [
        Span(rank, lane, str(Pass(kind, i, name)) if lane == "compute" else name, kind, i,
             name if lane == "compute" else 0, factor * start, factor * end)
        for rank, row in enumerate(found["drawing"]["ranks"])
        for lane, key in (("compute", "passes"), ("comm", "comms"), ("wait", "waits"))
        for kind, i, name, start, end in row[key]
    ]  # fmt: skip
    return Timeline.of_lanes(len(found["drawing"]["ranks"]), spans)


def test_a_recorded_timeline_is_compared_with_the_plan(tmp_path: Path) -> None:
    case = CASES["usual"]
    found = ask("simulate", case=case)
    save_timeline(timeline_of(found, 3.0), tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    beside = ask("recorded", text=text, case=case)
    assert beside["comparison"]["total"]["ratio"] == pytest.approx(3.0)
    assert beside["unit"] == pytest.approx(3.0)
    assert beside["idle"] == pytest.approx(found["figures"]["idle"])
    assert len(beside["drawing"]["ranks"]) == 4
    other = ask("recorded", text=text, case={**case, "m": 9})
    assert other["comparison"] is None
    assert "unit" not in other
    assert "is only planned" in other["why"]
    assert "the file holds no timeline" in refusal("recorded", text="{}", case=case)


def test_a_recorded_timeline_is_in_the_seconds_of_a_model(tmp_path: Path) -> None:
    case = CASES["of a model"]
    found = ask("simulate", case=case)
    save_timeline(timeline_of(found, 1.25), tmp_path / "t.json")
    beside = ask("recorded", text=(tmp_path / "t.json").read_text(), case=case)
    assert beside["unit"] == 1
    assert beside["comparison"]["total"]["ratio"] == pytest.approx(1.25)


def test_what_replicas_do_is_drawn_and_hidden_as_the_figures_say() -> None:
    case = CASES["with replicas"]
    found = ask("simulate", case=case)
    alone = ask("simulate", case={**case, "replicas": None})
    kinds = {span[0] for rank in found["drawing"]["ranks"] for span in rank["comms"]}
    assert kinds - {span[0] for r in alone["drawing"]["ranks"] for span in r["comms"]} == {
        "RG", "AG"
    }  # fmt: skip
    for rank, time in zip(found["drawing"]["ranks"], (3, 4, 3, 3), strict=True):
        buckets = [span for span in rank["comms"] if span[0] == "RG"]
        assert len(buckets) == 2 * 3  # of a chunk and of both layers of the vocabulary
        assert sum(span[4] - span[3] for span in buckets) == pytest.approx(time)
        assert sum(s[4] - s[3] for s in rank["passes"] if s[0] == "U") == pytest.approx(0.2)
    hidden = found["figures"]["hidden"]
    added = (1 - hidden["RG"]) * 4 + (1 - hidden["AG"]) * 1.5 + 0.2
    longer = found["figures"]["iteration_time"] - alone["figures"]["iteration_time"]
    assert 0 < longer <= added + 0.2
    assert found["figures"]["rows"] == alone["figures"]["rows"]


def test_auto_takes_the_fastest_of_the_schedules_that_are_compared() -> None:
    case = CASES["the best of all"]
    best = ask("simulate", case=case)["figures"]
    names = [name for name, own in ask("facts")["schedules"].items() if not own["compares"]]
    points = [
        ask("point", schedule=name, case={**case, "schedule": name})
        for name in names
        if name != "zb-auto"
    ]
    assert best["iteration_time"] == min(point["time"] for point in points)
    assert best["taken"] in names


def test_a_search_that_is_ended_says_so() -> None:
    case = CASES["two barriers"]
    assert ask("simulate", case={**case, "seconds": 0})["cut"]
    assert not ask("simulate", case=case)["cut"]


def test_models_to_begin_with_can_be_planned() -> None:
    facts = ask("facts")
    for sizes in facts["models"].values():
        found = ask("simulate", case={"m": 4, "model": sizes})
        assert 0.1 < found["forecast"]["mfu"] < 0.7
        assert sum(found["forecast"]["layers"]) == sizes["layers"]
    tight = ask("simulate", case={"m": 4, "model": {**SMALL_MODEL, "batch": 64}})
    assert max(tight["figures"]["peak_bytes"]) > tight["forecast"]["usable"]
