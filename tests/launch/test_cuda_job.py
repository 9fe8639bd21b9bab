"""Two ranks on CUDA, over NCCL, train as one does; one GPU is enough for both.

No host waits for its device within a schedule, and no device memory grows: ``watched_job.py``.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from cuda_path import needs_gpus

from megatron.simulator.timeline_file import load_timeline

ROOT = Path(__file__).resolve().parents[2]
WATCHED_JOB = ROOT / "tools/gpu_sections/watched_job.py"

pytestmark = needs_gpus


def losses(corpus: Path, ranks: int, flags: str) -> list[float]:
    """Losses of ten iterations, every rank on the first GPU.

    NCCL refuses two ranks of one host on one GPU; told that they are two hosts, it uses sockets.
    """
    base = (
        f"--pipeline-model-parallel-size {ranks} --num-layers 4 --hidden-size 64 "
        "--num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
        "--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --train-iters 10 --lr 1e-3 "
        "--tokenizer-type NullTokenizer --vocab-size 63 --device cuda --split 1,0,0 "
        "--init-method-std 0.2"
    )
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(WATCHED_JOB), "--data-path", str(corpus)]
    with ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            subprocess.Popen(
                [*command, *base.split(), *flags.split()],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "RANK": str(rank),
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "OMP_NUM_THREADS": "1",
                    "WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "localhost",
                    "MASTER_PORT": str(port),
                    "NCCL_DEBUG": "WARN",
                    "NCCL_HOSTID": f"host-{rank}",
                    "NCCL_NET": "Socket",
                    "NCCL_SOCKET_IFNAME": "lo",
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        wait_for_all_or_a_failure(processes, seconds=300)
        for output in outputs:
            output.seek(0)
        written = [output.read() for output in outputs]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(written)
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", written[0])]


def wait_for_all_or_a_failure(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Return when all have ended; once one has failed, or time is up, the others are killed."""
    deadline = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or any(process.poll() for process in processes):
                time.sleep(1)  # for the others' last words
                break
            time.sleep(0.1)
    finally:  # also when the waiting is interrupted
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def alone(corpus: Path) -> list[float]:
    return losses(corpus, 1, "")


@pytest.mark.parametrize(
    "flags",
    [
        "--vocab-parallel none",
        "--vocab-parallel vocab-1",
        "--vocab-parallel vocab-2",
        "--vocab-parallel naive",
        "--vocab-parallel vocab-2 --pipeline-schedule zb-v",
        "--vocab-parallel vocab-2 --enable-optimizer-post-validation",
    ],
)
def test_two_ranks_train_as_one(flags: str, corpus: Path, alone: list[float]) -> None:
    assert len(alone) == 10
    assert losses(corpus, 2, flags) == pytest.approx(alone, rel=1e-4)


def test_a_gpu_trains_as_a_cpu_from_the_same_weights(corpus: Path, alone: list[float]) -> None:
    expected = losses(corpus, 1, "--device cpu")
    found = losses(corpus, 1, "--use-cpu-initialization")
    assert found == pytest.approx(expected, rel=1e-3)
    assert alone[0] != pytest.approx(expected[0], rel=1e-3), "a GPU draws other weights"


def test_a_wrong_guess_is_undone(corpus: Path) -> None:
    """The norm falls from 5.1 to 1.9; in the second iteration the first rank's own is below 4.

    These are the norms of the weights that a CPU draws.
    """
    limit = "--clip-grad 4 --use-cpu-initialization"
    flags = f"{limit} --vocab-parallel vocab-2 --enable-optimizer-post-validation"
    assert losses(corpus, 2, flags) == pytest.approx(losses(corpus, 1, limit), rel=1e-4)


def test_what_a_gpu_did_is_recorded(corpus: Path, alone: list[float], tmp_path: Path) -> None:
    """Every pass of every rank once, one after another, by the GPU's own events."""
    path = tmp_path / "timeline.json"
    flags = "--vocab-parallel vocab-2 --pipeline-schedule zb-v --record-timeline"
    assert losses(corpus, 2, f"{flags} {path}") == pytest.approx(alone, rel=1e-4)
    timeline = load_timeline(path)
    chunked = {(kind, i, chunk) for kind in "FBW" for i in range(4) for chunk in range(2)}
    others = {(kind, i, 0) for kind in ("S", "T", "IF", "IB") for i in range(4)}
    for rank in range(2):
        passes = timeline.compute(rank)
        assert len(passes) == len(chunked | others)
        assert {(span.kind, span.microbatch, span.chunk) for span in passes} == chunked | others
        assert all(before.end <= after.start for before, after in pairwise(passes))


def test_bf16_trains_close_to_fp32(corpus: Path, alone: list[float]) -> None:
    assert losses(corpus, 2, "--vocab-parallel vocab-2 --bf16") == pytest.approx(alone, rel=3e-2)
