"""The jobs for machines with GPUs: what is started is what was predicted, and it fits."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from megatron.planning.forecast_run import forecast_run
from megatron.planning.race import chosen
from megatron.planning.run_plan import asked, make_run_plan
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.gpus import gpu

ROOT: Final = Path(__file__).resolve().parents[2]
OF_A_RUN: Final = ("--data-path", "--tokenizer-type", "--save", "--save-interval")


class Job(NamedTuple):
    """A script.

    Attributes:
        name: of the file.
        replicas: that it starts.
        gpu: that it is for.
        mfu: percent that a dry run promises at least.
    """

    name: str
    replicas: int
    gpu: str
    mfu: float


JOBS: Final = (
    Job("eight_a100.sh", 1, "A100", 45),
    Job("eight_h100.sh", 2, "H100", 45),
    Job("four_times_eight_h100.sh", 4, "H100", 45),
)

ECHO: Final = '#!/bin/sh\n[ "$1" = -c ] || echo "$@"\n'
"""A program that only prints what it is asked for; as a Python it can import everything."""


def printed(folder: Path, name: str, *words: str, **variables: str) -> list[str]:
    """The words behind pretrain_gpt.py in what a script would start."""
    for command in ("python", "torchrun", "srun"):
        file = folder / "venv/bin" / command
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(ECHO)
        file.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / name), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "VENV": str(folder / "venv"), **variables},
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    before, _, flags = done.stdout.partition("pretrain_gpt.py ")
    return [before, *shlex.split(flags)]


def predicted(folder: Path, job: Job) -> RunConfig:
    return parse(printed(folder, job.name, "--dry-run")[1:], 1)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_what_is_predicted_is_what_starts(job: Job, tmp_path: Path) -> None:
    run = predicted(tmp_path, job)
    assert run.dry_run is not None
    assert (run.dry_run.gpu, run.train.replicas) == (job.gpu, job.replicas)
    before, *started = printed(tmp_path, job.name, "my/data", "node1")
    assert "--nproc-per-node 8" in before
    at = {started.index(word) + i for word in OF_A_RUN for i in (0, 1)}
    words = [word for place, word in enumerate(started) if place not in at]
    words += ["--dry-run", "--dry-run-gpu", job.gpu]
    words += ["--dry-run-replicas", str(job.replicas)] if job.replicas > 1 else []
    again = parse(words, 1)
    assert (again.model, again.train, again.parallel) == (run.model, run.train, run.parallel)
    assert "my/data" in started


def test_pipelines_stay_in_their_machines(tmp_path: Path) -> None:
    run = predicted(tmp_path, JOBS[-1])
    place = run.parallel.placement
    assert (place.machines, place.hops, place.tensor, place.data) == (4, 0, False, True)


def test_under_slurm_each_process_is_a_rank(tmp_path: Path) -> None:
    before, *started = printed(
        tmp_path, "four_times_eight_h100.sh", "my/data", SLURM_STEP_NUM_TASKS="32"
    )
    assert "--nproc-per-node" not in before
    assert "my/data" in started
    variables = {"SLURM_SUBMIT_DIR": str(ROOT), "PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}"}
    [line] = printed(tmp_path, "slurm.sh", "my/data", **variables)[:1]
    assert f"{ROOT}/examples/four_times_eight_h100.sh my/data" in line


@pytest.mark.full
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_it_fits_and_is_fast(job: Job, tmp_path: Path) -> None:
    run = predicted(tmp_path, job)
    found = forecast_run(run, make_run_plan(run), gpu(job.gpu))
    assert found.fits, found.fullest
    assert found.outcome.mfu is not None
    assert 100 * found.outcome.mfu > job.mfu


@pytest.mark.full
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_no_schedule_of_auto_is_two_percent_faster(job: Job, tmp_path: Path) -> None:
    """Of those that fit the GPU by their bytes; of schedules that tie, ``auto`` takes the least."""
    words = printed(tmp_path, job.name, "--dry-run")[1:]
    words[words.index("--pipeline-schedule") + 1] = "auto"
    run = parse(words, 1)
    fitting = [each for each in asked(run) if forecast_run(run, each.run_plan, gpu(job.gpu)).fits]
    name = predicted(tmp_path, job).parallel.pipeline_schedule
    [own] = [each for each in fitting if each.schedule == name]
    assert own.time < 1.02 * chosen(fitting).time
