"""The report of a GPU in its small form: each section runs, and none can take the others along."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.engine_stand_in import installed, lacking
from optimizer import apex_stand_in

from megatron.kernels.adamw import AdamWTensors
from megatron.kernels.reference.kernels import ReferenceKernels
from tools import gpu_report
from tools.gpu_report import PARTS, ROOT, Part, Told, main, run_part
from tools.gpu_sections import eight_bits, elementwise, links, output_layer, ranks
from tools.gpu_sections.timing import Scale, laps, table

SMALL = Scale(torch.device("cpu"), small=True)


def small(folder: Path, *names: str, patience: float = 4.0) -> dict[str, Any]:
    """What the small form writes about some sections."""
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "tools/gpu_report.py"), "--device", "cpu",
            "--out", str(folder), "--patience", str(patience), "--only", *names,
        ],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return document


def test_all_of_it_takes_twelve_minutes_at_most() -> None:
    seconds = sum(part.seconds for part in PARTS.values())
    assert seconds <= 720
    assert f"they take {seconds:g} s at most" in Path(gpu_report.__file__).read_text()


def test_the_list_says_what_to_do_with_every_figure_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(gpu_report, "run_part")
    main(["--list"])
    printed = capsys.readouterr().out
    for name, part in PARTS.items():
        assert f"{name}: {part.title} ({part.seconds:g} s)\n  {part.advice[:20]}" in printed
    assert max(map(len, printed.splitlines())) < 100
    main(["--list", "--only", "links"])
    assert capsys.readouterr().out.startswith("links: ")


def test_a_section_has_what_those_before_it_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are compiled where they are first used, and how long that takes nobody knows."""
    given: dict[str, float] = {}
    takes = {"machine": 6.0, "output": 30.0, "training": 40.0}

    def run(name: str, part: Part, device: str, seconds: float) -> Told:
        given[name] = seconds
        return Told(part.title, [], {}, takes[name])

    monkeypatch.setattr(gpu_report, "run_part", run)
    main(["--device", "cpu", "--out", str(tmp_path), "--only", *takes])
    machine, output, training = (PARTS[name].seconds for name in takes)
    assert given["machine"] == machine
    assert given["output"] == machine + output - 6
    assert given["training"] == machine + output + training - 36


def test_s_and_t_have_a_line_for_every_number_of_shards(tmp_path: Path) -> None:
    found = small(tmp_path, "machine", "output")
    rows = found["output"]["values"]["rows"]
    assert [row["shards"] for row in rows] == [8, 16, 32]
    assert all(row["all"] > 0 for row in rows)
    assert found["machine"]["values"]["PyTorch"] == torch.__version__
    text = (tmp_path / "report.md").read_text()
    assert "these figures say nothing about GPUs" in text
    assert "--only machine output" in text


@pytest.mark.full
def test_work_between_products_has_its_speed(tmp_path: Path) -> None:
    speeds = small(tmp_path, "elementwise")["elementwise"]["values"]["bytes_per_s"]
    assert {"sum and LayerNorm", "rotation back", "AdamW"} < speeds.keys()
    assert all(speed > 0 for speed in speeds.values())


@pytest.mark.full
def test_products_in_8_bits_have_their_times_and_errors(tmp_path: Path) -> None:
    [found] = small(tmp_path, "eight bits")["eight bits"]["values"].values()
    assert all(value > 0 for name, value in found.items() if name != "errors")
    assert all(0.001 < error < 0.1 for error in found["errors"].values())


def test_transformer_engine_is_measured_where_it_is() -> None:
    without = eight_bits.measure(SMALL)
    assert any("Transformer Engine: it does not load here" in line for line in without.lines)
    for name in ("x W", "G W", "G x"):
        assert 0.001 < without.values["64"]["errors"][f"{name} in blocks,"] < 0.1
        assert 0.001 < without.values["64"]["errors"][f"{name} in MXFP8,"] < 0.1
    with installed(is_mxfp8_available=lacking):
        found = eight_bits.measure(SMALL)
    assert "Not mxfp8: Device compute capability 10.0 or higher required" in found.lines
    for recipe in ("tensorwise", "blockwise"):
        name = f"G x by Transformer Engine, {recipe},"
        assert 0.001 < found.values["64"]["errors"][name] < 0.1
        assert found.values["64"][f"G x, added by Transformer Engine, {recipe}"] > 0
    for kind in ("RMSNorm", "LayerNorm"):
        for way in (f"{kind}, then rounded", f"{kind} in 8 bits"):
            assert found.values["64"][f"{way} by Transformer Engine, delayed"] > 0
        assert (
            0.001 < found.values["64"]["errors"][f"{kind} W by Transformer Engine, delayed,"] < 0.1
        )


def test_apexs_step_is_the_one_that_it_is_measured_beside() -> None:
    def drawn() -> AdamWTensors:
        generator = torch.Generator().manual_seed(0)
        columns = [[torch.rand(37, generator=generator) for _ in range(2)] for _ in range(4)]
        no = [False] * 2
        weights = [torch.zeros(37, dtype=torch.bfloat16) for _ in range(2)]
        return AdamWTensors(columns[0], columns[1], columns[2], columns[3], weights, no, no)

    own, expected = drawn(), drawn()
    with apex_stand_in.installed():
        elementwise.step_by_apex(own).run()
    ReferenceKernels().adamw_(expected, replace(elementwise.STEP, weight_decay=0.0))
    for column in ("masters", "moments", "squares", "weights"):
        torch.testing.assert_close(getattr(own, column), getattr(expected, column))
    assert "Without apex's FusedAdam: it is for GPUs only." in elementwise.measure(SMALL).lines


def test_s_and_t_have_their_times_with_kept_logits_and_with_logits_again() -> None:
    found = output_layer.measure(SMALL)
    shards = [row["rows"] for row in found.values["rows"]]
    again = [(row["S forms A"], row["rows"]) for row in found.values["again"]]
    assert shards == [320, 160, 80]
    assert again == [(way, rows) for rows in (2560, 320, 160) for way in ("yes", "no")]
    figures = [row for rows in found.values.values() for row in rows]
    assert all(row["S, ms"] > 0 and row["T, ms"] > 0 for row in figures)
    for row in found.values["rows"]:
        assert row["S + T, ms"] == pytest.approx(row["S, ms"] + row["T, ms"])
        assert 0 < row["S + T / 3 products"] < row["all"]


@pytest.mark.parametrize(
    ("in_s", "again", "expected"),
    [(True, False, (3, 4)), (False, False, (1, 6)), (True, True, (3, 5)), (False, True, (1, 7))],
)
def test_every_product_of_the_output_layer_is_in_s_or_in_t(
    in_s: bool, again: bool, expected: tuple[int, int]
) -> None:
    own = output_layer.TimedShard(64, 2, 8, 8, in_s, again)
    assert own.products(1.0, 2.0, 4.0) == expected


@pytest.mark.full
def test_the_small_form_runs_to_its_end(tmp_path: Path) -> None:
    found = small(tmp_path, *PARTS)
    assert list(found) == list(PARTS)
    training, plain = found["training"]["values"], found["plain"]["values"]
    assert all(training[f"{kind} / products"] > 0 for kind in "FBW")
    ours, theirs = plain["ours, 1F1B"], plain["plain, torch.compile"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
    differences = found["features"]["values"]["differences"].values()
    assert len(differences) == 2
    assert all(float(difference) < 1e-4 for difference in differences)
    [small_model] = found["predicted"]["values"].values()
    assert 0 < small_model["step"] < small_model["iteration"]
    links = found["links"]["values"]
    assert [row[0] for row in links["rows"]] == [1, 2, 4, 8]
    assert all(row[3] > 0 for row in links["rows"])
    message = links["message_bytes"]
    assert message["peak"] >= message["one"]
    assert message["grouped"] >= message["one"]
    assert found["contract"]["values"]["returncode"] == 0


@pytest.mark.parametrize(
    ("name", "seconds", "why"),
    [
        ("no such section", 60.0, "it failed with status 2"),
        ("features", 0.01, "it was not done after"),
    ],
)
def test_a_section_that_fails_or_hangs_is_told(name: str, seconds: float, why: str) -> None:
    found = run_part(name, Part("Bad", "", seconds, ""), "cpu", seconds)
    assert found.failed
    assert why in found.lines[0]
    assert found.values == {}


def test_what_fails_leaves_the_others_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = (
        Told("Bad", ["**why**"], {}, 0.1, failed=True),
        Told("Good", ["all is well"], {}, 0.1),
    )
    parts = iter([bad, good])
    monkeypatch.setattr(gpu_report, "run_part", lambda *_: next(parts))
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cpu", "--out", str(tmp_path), "--only", "output", "plain"])
    assert ended.value.code == 1
    text = (tmp_path / "report.md").read_text()
    assert "**Failed: Bad.**" in text
    assert "all is well" in text


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "seconds", "error", "says"),
    [
        ("time.sleep(60)", "sys.exit('my fault')", 30.0, RuntimeError, "my fault"),
        ("sys.exit('its fault')", "time.sleep(60)", 30.0, RuntimeError, "its fault"),
        ("time.sleep(60)", "time.sleep(60)", 1.0, TimeoutError, "after 1 s: I am rank 0"),
    ],
)
def test_a_job_that_fails_says_what_the_rank_said_that_failed(
    rank_0: str,
    rank_1: str,
    seconds: float,
    error: type[Exception],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other rank waits for it, and is killed."""
    monkeypatch.setattr(ranks, "ROOT", tmp_path)
    (tmp_path / "pretrain_gpt.py").write_text(
        "import os, sys, time\n"
        "print('I am rank', os.environ['RANK'], flush=True)\n"
        f"if os.environ['RANK'] == '0':\n    {rank_0}\nelse:\n    {rank_1}\n"
    )
    with pytest.raises(error, match=says):
        ranks.train("", 2, "cpu", seconds, 1)


WATCHED = """
import runpy, sys, warnings
import torch
from megatron.runtime.pipeline import PipelineRank
now, held, train = ["default"], iter(range(9)), PipelineRank.train
def loud(self, *args, **options):
    if now[-1] == "warn":
        warnings.warn("called a synchronizing CUDA operation")
    return train(self, *args, **options)
PipelineRank.train = loud
torch.cuda.set_sync_debug_mode = now.append
torch.cuda.memory_allocated = lambda: next(held)
runpy.run_path("tools/gpu_sections/watched_job.py", run_name="__main__")
"""
"""Trains on a CPU, where each schedule has an operation that waits, and memory always grows."""


def test_a_whole_watched_job_says_what_was_seen(tmp_path: Path) -> None:
    """A job leaves without the interpreter's own end, so words at its end would be lost."""
    script = tmp_path / "job.py"
    script.write_text(WATCHED)
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
        "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --train-iters 5 "
        "--lr 1e-3 --mock-data --vocab-size 50 --device cpu --no-live-display"
    )
    done = subprocess.run(
        [sys.executable, str(script), *flags.split()],
        cwd=gpu_report.ROOT,
        env={**os.environ, "WATCHED": "say", "PYTHONPATH": str(gpu_report.ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{ranks.WAITS}job.py:8\n") == 1
    assert f"{ranks.GROWS}[0, 1, 2, 3, 4] bytes" in done.stdout


def test_products_leave_multiprocessors_free_by_the_library_that_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now: dict[str, object] = {"library": "cublas"}

    def prefer(library: str | None = None) -> object:
        now["library"] = library or now["library"]
        return now["library"]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    monkeypatch.setattr(
        torch._C, "_set_sm_carveout_experimental", lambda free: now.update(free=free)
    )
    with links.leaving_free(2):
        assert now == {"library": "cublaslt", "free": 2}
    assert now == {"library": "cublas", "free": None}


def test_laps_are_timed_one_by_one() -> None:
    scale = Scale(torch.device("cpu"), small=True)
    done: list[str] = []
    times = laps(scale, [lambda: done.append("a"), lambda: done.append("b")])
    assert len(times) == 2
    assert done == ["a", "b"] * (len(done) // 2)
    assert min(times) >= 0


def test_numbers_in_tables_are_short() -> None:
    assert table(("what", "ms"), [("a", 1.23456)]) == [
        "| what | ms |",
        "| --- | --: |",
        "| a | 1.235 |",
    ]
