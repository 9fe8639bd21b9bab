"""tools/emulate.py: real ranks that run through, compare, and never hang."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.costs.cost_file import save_costs
from tools.emulate import main
from tools.emulation.cases import EmulatedCase, measured_cases, parse_rows
from tools.emulation.cluster import Cluster, ClusterError
from tools.emulation.rank import EmulatedJob
from tools.predictions.measured import read_measured
from tools.predictions.measured_runs import MICROBATCHES, on_ranks
from tools.synthetic_runs import as_csv, run

ROOT = Path(__file__).resolve().parents[2]


def emulate(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/emulate.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    methods = ("baseline", "vocab-2", "interlaced")
    path.write_text(as_csv(run(m, 64_000, ranks=4, iteration_ms=900) for m in methods))
    costs = Costs(dict.fromkeys(("F", "B", "S", "T", "IF", "IB"), 1.0))
    save_costs(tmp_path / "vocab-2.json", costs, [[1]] * 4)
    (tmp_path / "whole.json").write_text(json.dumps({"passes": {"F": 1, "B": 2}}))
    return path


@pytest.mark.full
def test_runs_of_a_table_are_laid_beside_the_simulator(table: Path) -> None:
    arguments = ("--csv", table.name, "--rows", "1,3", "-m", "3", "--rounds", "1")
    done = emulate(*arguments, folder=table.parent)
    assert done.returncode == 0, done.stderr
    _, _, first, second, overhead, simulated = done.stdout.splitlines()
    assert [first.split()[1], second.split()[1]] == ["baseline", "interlaced"]
    errors = [abs(float(row.split()[6].rstrip("%"))) for row in (first, second)]
    assert re.fullmatch(r"executor overhead: \d+ us a pass in the median, .*", overhead)
    mean = re.fullmatch(r"mean abs error to simulated: (\d+\.\d\d) %", simulated)
    assert mean is not None
    assert float(mean[1]) == pytest.approx(sum(errors) / 2, abs=0.01)


@pytest.mark.full
def test_a_schedule_runs_with_jitter_and_comes_to_the_same(tmp_path: Path) -> None:
    passes = dict.fromkeys(("F", "B", "W", "S", "T", "IF", "IB"), 2.0)
    (tmp_path / "costs.json").write_text(
        json.dumps({"passes": passes, "comms": {"p2p": 0.5, "C1": 0.3, "O": 1.0, "L": 1.0}})
    )
    plan = ("--costs", "costs.json", "--unit", "0.001", "--schedule", "zb-v", "--vocab", "vocab-2")
    size = ("-p", "2", "-m", "4", "--rounds", "1", "--slow-down", "2")
    shaken = ("--jitter", "0.5", "--iterations", "10")
    (tmp_path / "cases.txt").write_text(
        "# the plan of the flags, then slices\n--vocab-parallel vocab-2\n\n"
        "--num-seq-splits 2 --offload-chunk-num 1\n"
    )
    slices = ("--cases", "cases.txt")
    done = emulate(*plan, *size, *shaken, *slices, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    _, slow, row, jitter, cut, cut_jitter, _, last = done.stdout.splitlines()
    assert slow.startswith("2 ranks; everything takes 2 times as long")
    assert row.split()[:3] == ["zb-v", "vocab-2", "4"]
    assert "10 iterations with up to 50% jitter" in jitter
    assert cut.split()[:5] == ["zb-v", "vocab-2", "4", "n=2", "host=1"]
    assert "results unchanged" in jitter
    assert "results unchanged" in cut_jitter
    assert last.startswith("mean abs error to simulated: ")


def test_microbatches_are_as_measured_or_as_asked(table: Path) -> None:
    [whole] = measured_cases(table, ["2"], None, None)
    [short] = measured_cases(table, ["2"], 16, None)
    assert whole.program.plan.microbatches == MICROBATCHES
    assert short.program.plan.microbatches == 16
    assert short.simulated < whole.simulated


def test_more_ranks_have_the_same_pass_times(table: Path) -> None:
    [case] = measured_cases(table, ["1"], 4, 7)
    assert case.ranks == 7
    measured = read_measured(table)[0]
    times = on_ranks(measured, 7).times["F"]
    own = measured.times["F"]
    assert times == (own[0], own[1], own[2], own[1], own[2], own[1], own[3])
    with pytest.raises(ValueError, match="the times of 4 ranks cannot become those of 2"):
        on_ranks(measured, 2)


@pytest.mark.parametrize(
    ("words", "rows"), [(["1"], [0]), (["2,4-6"], [1, 3, 4, 5]), (["3", "1"], [2, 0])]
)
def test_rows_are_picked_by_number(words: Sequence[str], rows: list[int]) -> None:
    assert parse_rows(words, 6) == rows


@pytest.mark.parametrize("word", ["0", "7", "5-7", "3-2", "x", ""])
def test_rows_that_are_not_there_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match=f"--rows '?{word}"):
        parse_rows([word], 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--csv", "nowhere.csv"], "cannot read nowhere.csv"),
        (["--csv", "runs.csv", "--rows", "9"], "--rows 9: the table has the rows 1 to 3"),
        (["--csv", "runs.csv", "-p", "2"], "cannot become those of 2"),
        (["--costs", "nowhere.json"], "cannot read nowhere.json"),
        (["--costs", "whole.json", "--cases", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--costs", "nowhere.json", "--rows", "1"], "--rows 1 goes with --csv"),
        *(
            (["--csv", "runs.csv", *words.split()], f"{words} goes with --measured-costs")
            for words in (
                "--pipeline-schedule zb-v",
                "--vocab-parallel vocab-2",
                "--num-virtual-stages-per-pipeline-rank 2",
                "--zero-bubble-max-pending-backward 4.0",
                "--schedule-file runs.csv",
                "--offload-chunk-num 1",
                "--unit 1.0",
            )
        ),
        (["--csv", "runs.csv", "--iterations", "9"], "--iterations 9 goes with --jitter"),
        (["--csv", "runs.csv", "--seed", "0"], "--seed 0 goes with --jitter"),
        (
            ["--costs", "whole.json", "--offload-chunk-num", "2"],
            "--offload-chunk-num 2 is more than the 1 chunk of a rank",
        ),
        (["--costs", "vocab-2.json"], "vocab-2.json: these costs were not measured with"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: list[str],
    message: str,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(table.parent)
    with pytest.raises((ValueError, SystemExit)) as refused:
        main(arguments)
    (line,) = (capsys.readouterr().err or str(refused.value)).splitlines()
    assert message in line


def test_a_refusal_is_all_that_is_printed(tmp_path: Path) -> None:
    done = emulate("--csv", "nowhere.csv", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot read nowhere.csv")
    assert done.stderr.count("\n") == 1


def job_of(seconds: float) -> EmulatedJob:
    plan = make_plan("1f1b", "none", 2, 2)
    costs = Costs({"F": seconds, "B": seconds})
    case = EmulatedCase("", lower(plan, costs), costs, unit=1.0)
    return EmulatedJob(case.program, case.costs, case.unit, iterations=1)


def test_a_rank_that_dies_takes_the_cluster_with_it() -> None:
    with Cluster(2) as cluster:
        assert len(cluster.run(job_of(0.001), 0.1)) == 2
        os.kill(cluster.processes[1].pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match="rank 1 died of SIGKILL"):
            cluster.run(job_of(0.001), 0.1)
    assert not any(process.is_alive() for process in cluster.processes)


def test_a_rank_that_raises_is_reported() -> None:
    job = job_of(0.001)
    bad = EmulatedJob(job.program, Costs({"F": 1.0}), 1e-3, iterations=1)
    with Cluster(2) as cluster, pytest.raises(ClusterError, match="no cost is given for B"):
        cluster.run(bad, 0.1)


def test_a_silent_rank_is_not_waited_for_for_ever() -> None:
    with Cluster(2, patience=0.5) as cluster, pytest.raises(ClusterError, match="no answer from"):
        cluster.run(job_of(30.0), 0.1)
