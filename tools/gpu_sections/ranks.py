"""Several ranks on the first GPU, over NCCL: they must come to the losses of one rank.

And one rank must come to those of a CPU, from the weights that the CPU draws.

NCCL refuses two ranks of a host on one GPU; told that they are on different hosts, it goes over
sockets. So this shows values and that nothing gets stuck, and no times.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tools.gpu_sections.timing import Scale, Section, table

ROOT: Final = Path(__file__).resolve().parents[2]
SECONDS: Final = 60.0
"""After which a job counts as stuck."""

WITHIN: Final = 1e-4
"""Of its size a loss may differ; fp32."""

LAYOUTS: Final = (
    "--pipeline-model-parallel-size 2 --vocab-parallel vocab-2 --pipeline-schedule zb-v",
    "--pipeline-model-parallel-size 2 --vocab-parallel vocab-1",
    "--tensor-model-parallel-size 2 --sequence-parallel --vocab-parallel none",
)

ON_CPU: Final = "--use-cpu-initialization"
"""Of one rank, compared with a CPU."""


def measure(scale: Scale) -> Section:
    """Train every layout, and compare its losses with those of one rank; that one with a CPU."""
    device = scale.device.type
    alone = losses_of("", 1, device)
    rows: list[tuple[str, str, str]] = []
    values: dict[str, float | None] = {}
    jobs = [(flags, 2) for flags in LAYOUTS[: 1 if scale.small else None]]
    for flags, ranks in [*jobs, (ON_CPU, 1)]:
        try:
            found = losses_of(flags, ranks, device)
            expected = losses_of("", 1, "cpu") if flags == ON_CPU else alone
        except (RuntimeError, TimeoutError) as error:
            rows.append((f"`{flags}`", "failed", str(error).replace("\n", " ")[-300:]))
            values[flags] = None
            continue
        off = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
        rows.append((f"`{flags}`", f"{off:.1e}", "yes" if off < WITHIN else "NO"))
        values[flags] = off
    said = (
        f"{len(alone)} iterations in fp32; one rank: {alone[0]:.6g} to {alone[-1]:.6g}. "
        f"{'NCCL over sockets' if device == 'cuda' else 'gloo'}, two ranks on one device. "
        f"With `{ON_CPU}` one rank is compared with a CPU."
    )
    head = ("layout", "largest relative difference", f"within {WITHIN:g}")
    return Section([said, "", *table(head, rows)], {"alone": alone, "differences": values})


def losses_of(
    flags: str, ranks: int, device: str, seconds: float = SECONDS, iterations: int = 10
) -> list[float]:
    """Return the losses of a job, which must end within ``seconds``.

    Raises:
        RuntimeError: a rank has failed; with its last words.
        TimeoutError: the job has not ended in time.
    """
    base = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 "
        f"--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --train-iters {iterations} "
        f"--lr 1e-3 --mock-data --vocab-size 250 --device {device} --init-method-std 0.2 "
        "--no-live-display"
    )
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *base.split(), *flags.split()]
    port = free_port()
    with ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **variables(rank, ranks, port)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        _wait(processes, seconds)
        for output in outputs:
            output.seek(0)
        written = [output.read() for output in outputs]
    for process, text in zip(processes, written, strict=True):
        if process.returncode:
            raise RuntimeError(text.strip()[-4000:])
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", written[0])]


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


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all ranks have ended; after a failure or a timeout the others are killed.

    Raises:
        TimeoutError: time is up.
    """
    deadline = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                raise TimeoutError(f"stuck: not done after {seconds:g} s")
            if any(process.poll() for process in processes):
                time.sleep(1)  # for the others' last words
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
