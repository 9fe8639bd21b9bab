"""Whole jobs as a user starts them: torchrun, the entrypoint, files, signals and exit codes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from command_lines import with_flags
from harness.job_guard import guarded
from harness.marks import full

from megatron.simulator.timeline_file import load_timeline

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120
"""Seconds after which a job counts as hanging; far more than any of these needs."""

ITERATION_LINE = re.compile(
    r"iteration +(?P<iteration>\d+)/ +(?P<last>\d+) \| consumed samples: +(?P<samples>\d+) \| "
    r"elapsed time per iteration \(ms\): [\d.]+ \| .*lm loss: (?P<loss>\S+) \| .*"
    r"grad norm: (?P<norm>\S+) \| number of skipped iterations: +0 \|"
)


def training_flags(corpus: Path | None, flags: str) -> list[str]:
    base = (
        "--pipeline-model-parallel-size 2 --enable-vocab-parallel --num-layers 2 "
        "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
        "--global-batch-size 8 --attention-dropout 0 --hidden-dropout 0 --log-interval 1 "
        "--tokenizer-type NullTokenizer --vocab-size 63 --device cpu --peak-tflops 0.1 "
    )
    data = ["--mock-data"] if corpus is None else ["--data-path", str(corpus)]
    return [
        str(ROOT / "pretrain_gpt.py"),
        *with_flags([*base.split(), *data], flags.split()),
    ]


UNLIKE = """
import os, runpy, sys
script, unlike = sys.argv[1:3]
sys.argv = [script, *(unlike.split() if os.environ["RANK"] == "1" else sys.argv[3:])]
runpy.run_path(script, run_name="__main__")
"""
"""Runs a script with other flags on rank 1."""


@contextmanager
def started(
    corpus: Path | None,
    flags: str,
    unlike: tuple[Path, str] | None = None,
    launcher: str = "",
    script: Path | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """A torchrun of two ranks, gone at the end whatever happens.

    Args:
        corpus: prefix of the data; ``None``: data that are made up.
        flags: of both ranks.
        unlike: a folder to write to, and flags that rank 1 has besides, or in place of others.
        launcher: flags of torchrun.
        script: runs in place of ``pretrain_gpt.py``.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += launcher.split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    entry, *words = training_flags(corpus, flags)
    if unlike is not None:
        folder, more = unlike
        (folder / "unlike.py").write_text(UNLIKE)
        entry, words = (
            str(folder / "unlike.py"),
            [entry, " ".join(with_flags(words, more.split())), *words],
        )
    process = subprocess.Popen(
        [*command, entry if script is None else str(script), *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with guarded(process):
        yield process


def rank_process(torchrun: int, rank: int) -> int:
    """The process that plays ``rank``."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    for child in children:
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise LookupError(f"no rank {rank} among {children}")


def check_last_screen(output: str) -> None:
    """The screen has the median of the printed times, and what the other treatment would take."""
    times = [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", output)]
    (measured,) = re.findall(
        r"^ measured: vocab-2, .* ([\d.e-]+) +([\d.]+)%$", output, re.MULTILINE
    )
    (predicted,) = re.findall(r"^ predicted: none, .* ([\d.e-]+) +([\d.]+)%$", output, re.MULTILINE)
    assert float(measured[0]) == pytest.approx(median(times[3:]) / 1e3, rel=0.02, abs=1e-4)
    assert 0 < float(measured[1]) < 100
    assert float(predicted[0]) > 0
    assert "time: the median of 27 iterations, 4 to 30; schedule 1f1b" in output
    assert output.index(" the run in short") > output.rindex("lm loss value")


def test_job_trains_evaluates_and_leaves_its_files(corpus: Path, tmp_path: Path) -> None:
    timeline, traces = tmp_path / "out" / "timeline.json", tmp_path / "traces"
    flags = (
        "--train-iters 30 --lr 1e-2 --lr-warmup-iters 2 --eval-interval 15 --eval-iters 1 "
        f"--record-timeline {timeline} --profile --profile-step-start 3 --profile-step-end 5 "
        f"--profile-dir {traces} --split 9,1,0 "
        "--generate-interval 15 --generate-prompt 5 62 --generate-max-new-tokens 6"
    )
    with started(corpus, flags) as job:
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    written = re.findall(r'^ text (\d) at iteration (\d+) \| "(\d+)" \| "[\d ]*" \|$', output, re.M)
    assert written == [("1", "15", "5"), ("2", "15", "62"), ("1", "30", "5"), ("2", "30", "62")]
    lines = [match for line in output.splitlines() if (match := ITERATION_LINE.search(line))]
    assert [int(line["iteration"]) for line in lines] == list(range(1, 31)), output
    assert [int(line["samples"]) for line in lines] == list(range(8, 241, 8))
    assert float(lines[0]["loss"]) - float(lines[-1]["loss"]) > 1.0
    check_last_screen(output)
    assert len(re.findall(r"validation loss at iteration (15|30) \|", output)) == 2, output
    assert "validation loss at iteration 30 on validation set | " in output
    recorded = load_timeline(timeline)
    assert recorded.ranks == 2
    assert {span.label for span in recorded.spans if span.rank == 1} >= {"F0", "B3", "S0", "T3"}
    by_rank = sorted(traces.iterdir())
    assert len(by_rank) == 2
    assert all(json.loads(trace.read_text())["traceEvents"] for trace in by_rank)


@pytest.mark.full
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
    assert len(printed[0]) == 7  # four of training, two evaluations between, one at the end
    assert re.search(r"iteration +7/ +7 ", printed[0][-2]), "the last loss, though 2 leaves it over"
    assert 0 < int(redone[0]) < 7, output


@pytest.mark.full
def test_mock_data_train_with_the_newest_options_and_a_layout() -> None:
    flags = (
        "--train-iters 30 --lr 1e-2 --eval-interval 30 --eval-iters 1 --bf16 --num-layers 6 "
        "--pipeline-model-parallel-layout E|t*2|(t|)*1t*3L --pipeline-schedule zb-v "
        "--disable-bias-linear --add-qkv-bias --squared-relu --position-embedding-type rope "
        "--rotary-interleaved --use-rope-scaling"
    )
    with started(None, flags) as job:
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    losses = [float(found["loss"]) for found in ITERATION_LINE.finditer(output)]
    assert losses[0] - losses[-1] > 1.0, output
    assert re.search(r"validation loss at iteration 30 ", output), output
    assert "vocab-2 splits the embedding (E)" in output


def test_a_limit_by_memory_is_told_once_and_trains_as_any_plan() -> None:
    losses = []
    for limit in (
        "--zero-bubble-adaptive-memory-limit-percentile 20",
        "--zero-bubble-max-pending-backward 1",
    ):
        flags = f"--train-iters 2 --lr 1e-3 --enable-zero-bubble {limit}"
        with started(None, flags) as job:
            output, _ = job.communicate(timeout=PATIENCE)
        assert job.returncode == 0, output
        assert "schedule zb-auto" in output
        told = "-percentile 20: the limit of a rank is " in output
        assert told == ("percentile" in limit)
        assert output.count("-percentile 20: ") == told
        losses.append([float(found["loss"]) for found in ITERATION_LINE.finditer(output)])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.full
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
    root_cause = output.partition("Root Cause")[2]
    assert "(SIGKILL)" in root_cause, output
    assert "<NO_OTHER_FAILURES>" in output
    assert "[rank 0] failed:" not in output


@pytest.mark.full
def test_diverged_loss_ends_the_job_and_names_iteration_and_rank(corpus: Path) -> None:
    flags = "--train-iters 50 --optimizer sgd --lr 1000 --clip-grad 0 --split 1,0,0"
    with started(corpus, flags) as job:
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode != 0
    [error] = errors_of(output)
    assert re.match(r"error: iteration \d+: lm loss is \S+: .*ranks? [01]", error)


BROKEN = """
import os
from typing import Any
import pretrain_gpt
from megatron.training import loop
train = loop.run_iteration
def broken(*arguments: Any, **named: Any) -> Any:
    if os.environ["RANK"] == "0" and arguments[4] == 3:
        raise LookupError("a bug in iteration 4")
    return train(*arguments, **named)
loop.run_iteration = broken
pretrain_gpt.main()
"""
"""Trains with a bug that shows on rank 0."""


@pytest.mark.full
def test_exception_on_one_rank_ends_the_job_with_its_traceback(
    corpus: Path, tmp_path: Path
) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    flags = "--train-iters 200 --lr 1e-3 --split 1,0,0"
    with started(corpus, flags, script=script) as job:
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode != 0
    assert "[rank 0] failed:" in output
    assert "Traceback" in output
    assert "LookupError: a bug in iteration 4" in output.partition("Root Cause")[2]


@pytest.mark.full
def test_a_side_file_that_cannot_be_written_does_not_end_the_job(
    corpus: Path, tmp_path: Path
) -> None:
    """Rank 0 alone writes the timeline, to a folder that is taken away while it trains."""
    flags = f"--train-iters 60 --lr 1e-3 --split 1,0,0 --record-timeline {tmp_path}/out/run.json"
    with started(corpus, flags) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if ITERATION_LINE.search(line):
                break
        (tmp_path / "out").rmdir()
        (tmp_path / "out").touch()
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0
    assert re.search(r"^--record-timeline: .*out.*; the run goes on without it$", output, re.M)


def errors_of(output: str) -> list[str]:
    """The lines in which a job says why it ends, the last on the screen but for a border.

    No rank has a traceback besides.
    """
    assert not re.search(r"\[rank \d\] failed:|pretrain_gpt.py\", line", output), output
    lines = [line.strip() for line in output.splitlines()]
    assert re.fullmatch("=+", lines[-1]), output
    errors = [line for line in lines if line.startswith("error:")]
    assert errors == lines[-1 - len(errors) : -1], output
    return errors


def test_mistakes_of_the_command_line_are_the_last_thing_on_the_screen(corpus: Path) -> None:
    """Once, though both ranks find them; and torchrun reports no other failure."""
    with started(corpus, "--train-iters 2 --lr 0 --clip-grad -1 --split 1,0,0") as job:
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode != 0
    title, *mistakes, border = [line.strip() for line in output.splitlines()][-4:]
    assert title == "error:"
    assert sorted(line.split(":")[0].split()[0] for line in mistakes) == ["--clip-grad", "--lr"]
    assert re.fullmatch("=+", border)
    for mistake in mistakes:
        assert output.count(mistake) == 1
    assert "<NO_OTHER_FAILURES>" in output
    assert re.search(r"exitcode +: 2 ", output)
    assert re.search(r"error_file: /", output)
    assert 'pretrain_gpt.py", line' not in output


@pytest.mark.full
def test_ranks_that_disagree_are_told_apart_before_they_train(corpus: Path, tmp_path: Path) -> None:
    flags = "--train-iters 3 --lr 1e-3 --split 1,0,0"
    other = "--num-layers 4 --seed 5 --pipeline-schedule zb-v"
    with started(corpus, flags, unlike=(tmp_path, other)) as job:
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode != 0
    [error] = errors_of(output)
    for name in ("model.num_layers", "train.seed", "plan", "training data", "of rank 1 differ"):
        assert name in error
    assert not ITERATION_LINE.search(output)


@pytest.mark.full
@pytest.mark.parametrize("alone", [False, True])
def test_a_foreign_token_ends_the_job_with_one_line(
    corpus: Path, tmp_path: Path, alone: bool
) -> None:
    """It comes in the middle of the run; on rank 1 alone, whose data lie elsewhere, or on both."""
    bad = tmp_path / "bad"
    tokens = np.fromfile(f"{corpus}.bin", np.uint16)
    tokens[len(tokens) // 2] = 64
    tokens.tofile(f"{bad}.bin")
    shutil.copy(f"{corpus}.idx", f"{bad}.idx")
    flags = "--train-iters 64 --lr 1e-3 --split 1,0,0"
    begun = time.monotonic()
    unlike = (tmp_path, f"--data-path {bad}") if alone else None
    with started(corpus if alone else bad, flags, unlike) as job:
        output, _ = job.communicate(timeout=PATIENCE)
    assert time.monotonic() - begun < PATIENCE / 2
    assert job.returncode != 0
    assert ITERATION_LINE.search(output), output
    [error] = errors_of(output)
    assert re.match(
        rf"error: --data-path {bad}: sample \d+ holds token ids .*64.* --vocab-size", error
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--train-iters 2 --lr 1e-3 --num-layers 3", "--num-layers 3"),
        full("--train-iters 2 --lr 1e-3 --data-path nowhere", "nowhere"),
        full("--train-iters 2 --lr 1e-3 --vocab-size 40", "--vocab-size"),
        full("--train-iters 2 --lr 1e-3 --record-timeline /dev/null/run.json", "--record-timeline"),
        full("--train-iters 2 --lr 1e-3 --layer-distribution 2,0,0", "--layer-distribution 2,0,0"),
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
    *waits, line = done.stderr.splitlines()
    # For another test that compiles, and for packages on a busy machine.
    assert all(each.startswith(("waited ", "starting: ")) for each in waits)
    assert line.startswith("error:")
    assert named in line
