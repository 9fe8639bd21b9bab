"""Whole jobs as a user starts them: torchrun, the entrypoint, files, signals and exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.data.indexed import IndexedWriter
from megatron.simulator.timeline_file import load_timeline

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120
"""Seconds after which a job counts as hanging; far more than any of these needs."""

ITERATION_LINE = re.compile(
    r"iteration +(?P<iteration>\d+)/ +(?P<last>\d+) \| consumed samples: +(?P<samples>\d+) \| "
    r"elapsed time per iteration \(ms\): [\d.]+ \| .*lm loss: (?P<loss>\S+) \| .*"
    r"grad norm: (?P<norm>\S+) \| number of skipped iterations: +0 \|"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that count upwards modulo 50, which a model soon learns."""
    prefix = tmp_path_factory.mktemp("corpus") / "counting"
    with IndexedWriter(prefix, 64) as writer:
        for document in range(200):
            writer.add_document([(document + i) % 50 for i in range(40)] + [63])
    return prefix


def training_flags(corpus: Path, flags: str) -> list[str]:
    base = (
        "--pipeline-model-parallel-size 2 --enable-vocab-parallel --num-layers 2 "
        "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
        "--global-batch-size 8 --attention-dropout 0 --hidden-dropout 0 --log-interval 1 "
        "--tokenizer-type NullTokenizer --vocab-size 63 --device cpu --peak-tflops 0.1 "
    )
    return [
        str(ROOT / "pretrain_gpt.py"),
        *base.split(),
        "--data-path",
        str(corpus),
        *flags.split(),
    ]


@contextmanager
def started(corpus: Path, flags: str) -> Iterator[subprocess.Popen[str]]:
    """A torchrun of two ranks, gone at the end whatever happens."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, *training_flags(corpus, flags)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def rank_process(torchrun: int, rank: int) -> int:
    """The process that plays ``rank``."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    for child in children:
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise LookupError(f"no rank {rank} among {children}")


def test_job_trains_evaluates_and_leaves_its_files(corpus: Path, tmp_path: Path) -> None:
    timeline, traces = tmp_path / "out" / "timeline.json", tmp_path / "traces"
    flags = (
        "--train-iters 30 --lr 1e-2 --lr-warmup-iters 2 --eval-interval 15 --eval-iters 1 "
        f"--record-timeline {timeline} --profile --profile-step-start 3 --profile-step-end 5 "
        f"--profile-dir {traces} --split 9,1,0"
    )
    with started(corpus, flags) as job:
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    lines = [match for line in output.splitlines() if (match := ITERATION_LINE.search(line))]
    assert [int(line["iteration"]) for line in lines] == list(range(1, 31)), output
    assert [int(line["samples"]) for line in lines] == list(range(8, 241, 8))
    assert float(lines[0]["loss"]) - float(lines[-1]["loss"]) > 1.0
    assert len(re.findall(r"validation loss at iteration (15|30) ", output)) == 2, output
    recorded = load_timeline(timeline)
    assert recorded.ranks == 2
    assert {span.label for span in recorded.spans if span.rank == 1} >= {"F0", "B3", "S0", "T3"}
    by_rank = sorted(traces.iterdir())
    assert len(by_rank) == 2
    assert all(json.loads(trace.read_text())["traceEvents"] for trace in by_rank)


def test_post_validation_prints_the_lines_of_the_synchronous_step(
    corpus: Path, tmp_path: Path
) -> None:
    """All but the times, with evaluations and a recorded iteration in between."""
    flags = (
        "--train-iters 7 --lr 1e-2 --eval-interval 3 --eval-iters 1 --split 9,1,0 --clip-grad 1.5 "
        f"--log-interval 2 --record-timeline {tmp_path / 'timeline.json'} "
    )
    printed = []
    for more in ("", "--enable-optimizer-post-validation"):
        with started(corpus, flags + more) as job:
            output, _ = job.communicate(timeout=PATIENCE)
        assert job.returncode == 0, output
        told = re.sub(r"elapsed .* learning rate|\[\d{4}-.*?\]", "", output)
        printed.append(re.findall(r"^.*lm loss.*$", told, re.MULTILINE))
        redone = re.findall(r"post-validation: (\d) of 7 steps redone", output)
    assert printed[0] == printed[1]
    assert len(printed[0]) == 5
    assert 0 < int(redone[0]) < 7, output


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds ranks by /proc: Linux")
def test_killed_rank_ends_the_job_with_a_message(corpus: Path) -> None:
    with started(corpus, "--train-iters 100000 --lr 1e-3 --split 1,0,0") as job:
        assert job.stdout is not None
        for line in job.stdout:
            if ITERATION_LINE.search(line):
                break
        os.kill(rank_process(job.pid, 1), signal.SIGKILL)
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode != 0
    assert "SIGKILL" in output, output


def test_diverged_loss_ends_the_job_and_names_iteration_and_rank(corpus: Path) -> None:
    flags = "--train-iters 50 --lr 1e30 --clip-grad 0 --split 1,0,0"
    with started(corpus, flags) as job:
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode != 0
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, output
    assert re.match(r"error: iteration \d+: lm loss is \S+: .*rank [01]", errors[0])


def test_exception_on_one_rank_ends_the_job_with_its_traceback(
    corpus: Path, tmp_path: Path
) -> None:
    """Rank 0 alone writes the timeline of the last iteration; the other waits for it at the end."""
    (tmp_path / "file").touch()
    flags = "--train-iters 3 --lr 1e-3 --split 1,0,0"
    with started(corpus, f"{flags} --record-timeline {tmp_path}/file/timeline.json") as job:
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode != 0
    assert "[rank 0] failed:" in output
    assert str(tmp_path / "file") in output


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--train-iters 2 --lr 1e-3 --num-layers 3", "--num-layers 3"),
        ("--train-iters 2 --lr 1e-3 --data-path nowhere", "nowhere"),
    ],
)
def test_bad_flag_is_one_line_and_exit_code_two(corpus: Path, flags: str, named: str) -> None:
    """No process group could be made here: nobody said where the ranks would meet."""
    done = subprocess.run(
        [sys.executable, *training_flags(corpus, flags)],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error:")
    assert named in line
