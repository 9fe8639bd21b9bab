"""Small jobs whose ranks share the first GPU, over NCCL.

NCCL refuses two ranks of a host on one GPU; told that they are on different hosts, it goes over
sockets. So a job shows values and that nothing gets stuck, and no times.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

WAITS: Final = "the host waits: "
GROWS: Final = "memory grows: "
"""How the lines begin that ``watched_job.py`` adds to the output of a rank as it trains."""

MOCK_DATA: Final = "--mock-data --vocab-size 250"


@dataclass(frozen=True)
class Trained:
    """What a job has said.

    Attributes:
        losses: of every iteration.
        seen: what ``watched_job.py`` saw in the schedules of any rank, if anything.
    """

    losses: list[float]
    seen: str


def train(
    flags: str,
    ranks: int,
    device: str,
    seconds: float,
    iterations: int,
    *,
    data: str = MOCK_DATA,
    strict: bool = False,
) -> Trained:
    """Train a small model in a job; on a GPU it is watched, see ``watched_job.py``.

    Args:
        flags: of the job, besides those of the small model.
        ranks: of the job.
        device: ``cuda`` or ``cpu``.
        seconds: within which the job must end.
        iterations: of the job.
        data: flags of the data and the vocabulary.
        strict: a host that waits within a schedule, or memory that grows, ends the job.

    Raises:
        RuntimeError: a rank has failed; with its last words.
        TimeoutError: the job has not ended in time; with the last words of a rank.
    """
    base = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 "
        f"--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --train-iters {iterations} "
        f"--lr 1e-3 --device {device} --init-method-std 0.2 --no-live-display {data}"
    )
    program = "tools/gpu_sections/watched_job.py" if device == "cuda" else "pretrain_gpt.py"
    command = [sys.executable, str(ROOT / program), *base.split(), *flags.split()]
    port, watched = free_port(), "error" if strict else "say"
    with ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **variables(rank, ranks, port), "WATCHED": watched},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        in_time = _wait(processes, seconds)
        for output in outputs:
            output.seek(0)
        written = [output.read() for output in outputs]
    if not in_time:
        last = _last_words(processes, written)[-400:]
        raise TimeoutError(f"stuck: not done after {seconds:g} s: {last}")
    if any(process.returncode for process in processes):
        raise RuntimeError(_last_words(processes, written))
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", written[0])]
    lines = (line for rank in written for line in rank.splitlines())
    seen = [line for line in lines if line.startswith((WAITS, GROWS))]
    return Trained(losses, "; ".join(dict.fromkeys(seen)))


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
    return port


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment of a rank; NCCL believes that each rank has a host of its own.

    Args:
        rank: its number.
        ranks: of the job.
        port: on which rank 0 listens.
    """
    return {
        "PYTHONPATH": str(ROOT),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "NCCL_HOSTID": f"host-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def _last_words(processes: list[subprocess.Popen[bytes]], written: list[str]) -> str:
    """Return the end of what a rank has written that has failed by itself, if one has.

    The other ranks were killed, while they waited for that one.
    """
    was_killed = [process.returncode in (0, -signal.SIGKILL) for process in processes]
    return written[was_killed.index(min(was_killed))].strip()[-4000:]


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Wait until all ranks have ended; after a failure or a timeout the others are killed.

    Returns:
        Whether there was time enough.
    """
    deadline = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                return False
            if any(process.poll() for process in processes):
                time.sleep(1)  # for the others' last words
                break
            time.sleep(0.1)
        return True
    finally:
        for process in processes:
            process.kill()
            process.wait()
