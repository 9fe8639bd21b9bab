"""The examples do what they say: all without training, and with --full for real."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

import pytest
from harness.rank_pool import RankPool
from harness.still_watch import still_watch

from examples import own_layers, torchtitan_plan, vocab_parallel_head
from examples.s_and_t import differences
from megatron.library.plans import plan, to_torch_csv
from megatron.planning import dry_run as dry_runs
from megatron.planning.run_plan import make_run_plan
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.gpus import gpu

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLES: Final = sorted(
    path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".sh")
)
OF_DATA: Final = ("--data-path", "--tokenizer-model", "--tokenizer-type", "--vocab-size")

STAND_IN: Final = f"""#!/bin/sh
case "$1" in
  -c) ;;
  */pretrain_gpt.py) echo "$@" ;;
  *) exec {shlex.quote(sys.executable)} "$@" ;;
esac
"""
"""A Python for the dry runs: it can import what it is asked for, and only prints a training."""


def run(name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = ["bash" if name.endswith(".sh") else sys.executable, str(ROOT / "examples" / name)]
    return subprocess.run(
        [*command, *words], capture_output=True, text=True, env=kept | variables, cwd="/"
    )


def dry_run(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run an example on CPUs with all but the training."""
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    variables = {"VENV": str(folder / "venv"), "CUDA_VISIBLE_DEVICES": "", "DRY_RUN": "1"}
    done = run(name, *words, MEGATRON_CACHE=str(folder / "cache"), **variables)
    assert done.returncode == 0, done.stderr
    return done


def trainings(printed: str, vocab_size: int = 32_000) -> Iterator[RunConfig]:
    """Yield what the printed command lines of pretrain_gpt.py ask for, without their data."""
    for line in printed.splitlines():
        before, _, flags = line.partition("pretrain_gpt.py ")
        if flags:
            ranks = re.search(r"--nproc-per-node (\d+)", before)
            words = shlex.split(flags)
            data = {at + i for at, word in enumerate(words) if word in OF_DATA for i in (0, 1)}
            kept = [word for at, word in enumerate(words) if at not in data]
            if not {"--bf16", "--fp16"} & {*kept}:  # this machine multiplies fp32 faster
                kept.append("--bf16")
            kept += ["--dry-run", "--vocab-size", str(vocab_size)]
            yield parse(kept, int(ranks[1]) if ranks else 1)


def test_the_page_of_the_examples_links_every_example() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    linked = re.findall(r"\]\((\w+\.(?:py|sh))\)", page)
    assert sorted(linked) == [path.name for path in EXAMPLES]
    files = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert files == {*linked, "README.md"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_says_how_to_run_it_and_what_to_see(path: Path) -> None:
    head = path.read_text().split("set -euo" if path.suffix == ".sh" else "import ")[0]
    assert f"examples/{path.name}" in head
    assert "You should see" in head


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_s_and_t_are_cross_entropy(ranks: RankPool, world_size: int) -> None:
    for found in ranks.run(differences, world_size):
        assert max(found) < 1e-13


def test_pytorch_trains_the_file_for_torchtitan(ranks: RankPool, tmp_path: Path) -> None:
    made = plan(torchtitan_plan.SCHEDULE, 2, torchtitan_plan.MICROBATCHES)
    file = tmp_path / "plan.csv"
    file.write_text(to_torch_csv(made))
    assert max(ranks.run(torchtitan_plan.gradient_fault, 2, file=str(file))) < 1e-13


def losses_of_split_model(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    found, log_probs = vocab_parallel_head.split_losses()
    return found, log_probs.flatten().tolist()


def test_a_model_with_a_split_vocabulary_trains_as_the_whole_one(ranks: RankPool) -> None:
    expected, log_probs = vocab_parallel_head.whole_losses()
    assert expected[-1] < expected[0] - 0.5
    for found in ranks.run(losses_of_split_model, 2):
        assert found[0] == pytest.approx(expected, abs=1e-10)
        assert found[1] == pytest.approx(log_probs.flatten().tolist(), abs=1e-9)


def test_own_layers_train_in_a_pipeline_as_in_one_process(ranks: RankPool) -> None:
    expected = own_layers.whole_losses()
    for found in ranks.run(own_layers.pipeline_losses, 2):
        assert found == pytest.approx(expected, abs=1e-9)


def test_own_text_becomes_the_data_of_a_job_with_vocabulary_parallelism(tmp_path: Path) -> None:
    (tmp_path / "my text.txt").write_text("the quick brown fox jumps over the lazy dog\n\n" * 50)
    done = dry_run(tmp_path, "own_text.sh", str(tmp_path / "my text.txt"))
    (training,) = trainings(done.stdout)
    assert training.parallel.vocab_parallel == "vocab-2"
    words = shlex.split(done.stdout)
    prefix = Path(words[words.index("--data-path") + 1])
    assert prefix.is_relative_to(tmp_path / "cache")
    assert prefix.with_suffix(".bin").stat().st_size > 0
    assert Path(words[words.index("--tokenizer-model") + 1]).is_file()


def test_an_own_plan_is_refused_when_wrong_and_trained_when_right(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "own_plan.sh")
    assert "wrong.plan cannot be run" in done.stderr
    assert ">B0<" in done.stderr
    held = re.findall(r"rank 0: works 14, holds up to (\d) microbatches", done.stdout)
    assert held == ["3", "2"]
    ends = [float(time) for time in re.findall(r": time ([\d.]+), idle", done.stdout)]
    assert 1.3 < ends[1] / ends[0] < 1.4, "the example says a third longer"
    saved, mine = (make_run_plan(training).plan for training in trainings(done.stdout))
    assert saved.rows[1] == mine.rows[1]
    assert saved.rows[0] != mine.rows[0]
    assert sorted(map(str, saved.rows[0])) == sorted(map(str, mine.rows[0]))


def test_a_measurement_saves_costs_and_plans_anew(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "measure_and_replan.sh")
    (training,) = trainings(done.stdout)
    assert training.log.replan
    assert training.log.profile_schedule_start == 5
    assert training.log.save_measured_costs is not None
    assert make_run_plan(training).plan.split_backward


def test_a_job_of_eight_gpus_is_the_one_that_was_predicted(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "eight_gpus.sh")
    baseline, planned, started = trainings(done.stdout)
    assert baseline.parallel.vocab_parallel == "none"
    assert planned.model == started.model
    assert replace(planned.parallel, gpu=started.parallel.gpu) == started.parallel
    assert (planned.model, planned.train) == (baseline.model, baseline.train)


def run_for_real(name: str) -> str:
    done = run(name, VENV=sys.prefix, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", printed)]


@pytest.mark.full
def test_s_and_t_run_by_themselves() -> None:
    printed = run_for_real("s_and_t.py")
    small = r"(?:0e\+00|\de-1[3-9])"
    line = rf"^rank (\d) of 4: differs .* by {small} in .*, {small} in .*, {small} in that of .*$"
    assert sorted(re.findall(line, printed, re.MULTILINE)) == ["0", "1", "2", "3"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "lines", "last"),
    [
        ("torchtitan_plan.py", 11, r"rank \d of 2: gradients differ by (0e\+00|\de-1[4-9]) "),
        ("vocab_parallel_head.py", 12, r"differ by \de-1[2-9] at most"),
        ("own_layers.py", 5, r"step 4: loss (\S+) in the pipeline, \1 in one process"),
    ],
)
def test_a_library_example_runs_by_itself(name: str, lines: int, last: str) -> None:
    printed = run_for_real(name).splitlines()
    assert len(printed) == lines
    assert re.match(last, printed[-1])


@pytest.mark.full
def test_own_text_is_learned() -> None:
    found = losses(run_for_real("own_text.sh"))
    assert found[0] == pytest.approx(9.0, abs=0.1)
    assert found[-1] < 7
    assert all(later - sooner < 1 for sooner, later in pairwise(found)), "no batch throws it up"


@pytest.mark.full
def test_both_plans_have_the_same_losses() -> None:
    printed = run_for_real("own_plan.sh")
    table = printed.split("=== Losses")[1].splitlines()[1:]
    pairs = [line.split() for line in table]
    assert len(pairs) == 8
    assert all(saved == mine for saved, mine in pairs)


@pytest.mark.full
def test_a_measured_job_is_compared_and_other_schedules_are_predicted() -> None:
    printed = run_for_real("measure_and_replan.sh")
    assert re.search(r"^iterations 5 to 7 measured: F .* W ", printed, re.MULTILINE)
    assert "\nreplan: " in printed
    assert re.search(r"^iteration +[\d.]+ +[\d.]+ +[\d.]+$", printed, re.MULTILINE)
    other = re.findall(
        r"^(1f1b|zb-1p|zb-2p), vocabulary vocab-2, p = 2, m = 8: time ", printed, re.M
    )
    assert other == ["1f1b", "zb-1p", "zb-2p"]
    assert (ROOT / "examples/out/measure/both.svg").is_file()


@pytest.mark.full
def test_eight_gpus_are_told_what_fits(tmp_path: Path) -> None:
    """The example's own searches end by the clock; here they end by themselves."""
    printed = dry_run(tmp_path, "eight_gpus.sh").stdout
    assert "torchrun --nproc-per-node 8" in printed.split("=== On the machine with 8 GPUs")[1]
    before, after = (
        "\n\n".join(dry_runs.dry_run(training, gpu("A100-40GB"), still_watch()))
        for training in islice(trainings(printed, 256_000), 2)
    )
    assert "does not fit" in before
    first = before.split("what would fit, the fastest first:\n")[1].split("\n")[0]
    tied = "(zb-v|dualpipe-v)"
    assert re.match(rf"  --pipeline-schedule {tied} --vocab-parallel vocab-2: ", first)
    assert "does not fit" not in after
