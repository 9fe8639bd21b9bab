"""A job whose ranks are killed again and again ends as if nothing had happened, to the last bit.

One of them has experts spread over ranks, and goes on in another layout afterwards.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.job_guard import guarded

from megatron.checkpoint import folder
from tools.checkpoint import main as checkpoint_tool

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("chaos_job.py")
PATIENCE = 900
"""Seconds after which the job counts as hanging."""

BATCH = 8
SAVES, TRAINS, STARTS = "during a save", "while it trains", "while it starts"
LINE = re.compile(r"iteration +(\d+)/ +\d+ \|.*?lm loss: (\S+) \|.*grad norm: (\S+) \|")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not Path("/proc/self/environ").exists(), reason="finds ranks by /proc: Linux"
    ),
]


@dataclass(frozen=True)
class Chaos:
    """A job that is killed.

    Attributes:
        ranks: of the job.
        flags: of its layout and of its saves.
        iterations: that it trains.
        kills: how often one of its ranks is killed.
        seed: of the ranks, and of the moments.
        then: ranks and flags of another layout, in which the job goes on after its end.
    """

    ranks: int
    flags: str
    iterations: int
    kills: int
    seed: int
    then: tuple[int, str] | None = None


@contextmanager
def started(chaos: Chaos, root: Path) -> Iterator[subprocess.Popen[str]]:
    """The job under torchrun, which starts it anew when a rank dies; its output is in a file."""
    flags = (
        "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data "
        f"--micro-batch-size 1 --global-batch-size {BATCH} --vocab-size 63 --lr 1e-2 --device cpu "
        f"--train-iters {chaos.iterations} --log-interval 1 --split 1,0,0 --peak-tflops 0.1 "
        f"--save {root}/saved --load {root}/saved --save-interval 2 --save-retain-interval 1000 "
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(chaos.ranks)]
    command += ["--max-restarts", str(chaos.kills), "--monitor-interval", "0.1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(JOB)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "CHAOS_RECORDS": str(root / "records"),
    }
    (root / "records").mkdir(parents=True, exist_ok=True)
    with (root / "output").open("w") as output:
        process = subprocess.Popen(
            [*command, *flags.split(), *chaos.flags.split()],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        with guarded(process):
            yield process


def ranks_of(torchrun: int) -> dict[int, int]:
    """The processes of the ranks that live, by rank."""
    found = {}
    with suppress(OSError):
        for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
            with suppress(OSError):
                environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                for entry in environment:
                    if entry.startswith(b"RANK="):
                        found[int(entry[5:])] = int(child)
    return found


def wait_until(job: subprocess.Popen[str], condition: Callable[[], bool]) -> bool:
    """Wait for a condition; return whether it came true before the job ended."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if condition():
            return True
        if job.poll() is not None:
            return False
        time.sleep(0.005)
    raise AssertionError("waited in vain: the job hangs")


def comes_to(
    kind: str, job: subprocess.Popen[str], chaos: Chaos, root: Path, before: Collection[int]
) -> bool:
    """Wait until a job that has been started anew comes to a moment; return whether it did.

    Args:
        kind: of moment.
        job: torchrun.
        chaos: the job.
        root: its folder.
        before: the processes of the launch before.
    """

    def iterations() -> int:
        return (root / "output").read_text().count("lm loss")

    def is_new() -> bool:
        now = ranks_of(job.pid)
        return len(now) == chaos.ranks and set(now.values()).isdisjoint(before)

    def saves() -> bool:
        return any((root / "saved").glob("iter_*.partial"))

    if not wait_until(job, is_new) or kind == STARTS:
        return job.poll() is None
    trained = iterations()
    if not wait_until(job, lambda: iterations() > trained):
        return False
    return kind == TRAINS or wait_until(job, saves)


def kill_some(job: subprocess.Popen[str], chaos: Chaos, root: Path) -> list[str]:
    """Kill ranks at random moments of all kinds; return where each kill found the job."""
    draw, found, before = random.Random(chaos.seed), list[str](), list[int]()
    kinds = [SAVES, TRAINS, *draw.choices((SAVES, TRAINS, STARTS), (5, 4, 1), k=chaos.kills)]
    for kind in kinds[: chaos.kills]:
        if not comes_to(kind, job, chaos, root, before):
            break
        time.sleep(draw.random() ** 2 * (0.05 if kind == SAVES else 1.0))
        processes, victim = ranks_of(job.pid), draw.randrange(chaos.ranks)
        if victim not in processes:
            break
        before = list(processes.values())
        found.append(f"rank {victim} {kind}")
        os.kill(processes[victim], signal.SIGKILL)
    return found


def run(chaos: Chaos, root: Path) -> tuple[list[str], str]:
    """Run the job to its end; return where it was killed, and what it printed."""
    with started(chaos, root) as job:
        killed = kill_some(job, chaos, root)
        job.wait(timeout=PATIENCE)
    output = (root / "output").read_text()
    assert job.returncode == 0, output
    return killed, output


def printed(output: str) -> dict[int, set[tuple[str, str]]]:
    """Loss and gradient norm of every iteration, each time it was printed."""
    found: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for iteration, loss, norm in LINE.findall(output):
        found[int(iteration)].add((loss, norm))
    return found


def samples_read(root: Path) -> dict[tuple[int, int], set[tuple[int, ...]]]:
    """By rank and number of a batch's first sample: the samples, each way it was read."""
    found: dict[tuple[int, int], set[tuple[int, ...]]] = defaultdict(set)
    for file in (root / "records").iterdir():
        for line in file.read_text().splitlines():
            if not line.endswith("}"):
                continue  # the process died while it wrote it
            batch = json.loads(line)
            found[batch["rank"], batch["first"]].add(tuple(batch["samples"]))
    return found


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8 --moe-aux-loss-coeff 0.01 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --disable-bias-linear"
)
CASES = {
    "2 kills, experts": Chaos(
        2,
        f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--use-distributed-optimizer",
        10,
        2,
        seed=1,
        then=(2, f"{EXPERTS} --pipeline-model-parallel-size 2 --enable-vocab-parallel"),
    ),
    "20 kills, synchronous": Chaos(
        2,
        "--pipeline-model-parallel-size 2 --enable-vocab-parallel --enable-zero-bubble",
        60,
        20,
        seed=2,
    ),
    "20 kills, asynchronous, replicas": Chaos(
        4, "--pipeline-model-parallel-size 2 --async-save --overlap-grad-reduce", 60, 20, seed=3
    ),
    "4 kills, tensor parallel": Chaos(
        4,
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--enable-vocab-parallel",
        20,
        4,
        seed=4,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_kills_at_random_moments_change_nothing(name: str, tmp_path: Path) -> None:
    chaos = CASES[name]
    unbroken = Chaos(chaos.ranks, chaos.flags, chaos.iterations, 0, 0)
    _, expected = run(unbroken, tmp_path / "unbroken")
    killed, output = run(chaos, tmp_path / "killed")
    print("\n".join(killed))
    assert len(killed) == chaos.kills, (killed, output)

    losses = printed(expected)
    assert sorted(losses) == list(range(1, chaos.iterations + 1))
    assert all(len(values) == 1 for values in losses.values())
    assert printed(output) == losses, "every iteration, each time it was trained"

    read = samples_read(tmp_path / "unbroken")
    firsts = range(0, chaos.iterations * BATCH, BATCH)
    for first in firsts:  # the ranks of a replica read the same ones, the replicas all of a batch
        of_ranks = {tuple(*read[rank, first]) for rank in range(chaos.ranks)}
        assert sorted(sum(of_ranks, ())) == list(range(first, first + BATCH))
    again = samples_read(tmp_path / "killed")
    assert {batch: again[batch] for batch in read} == read, "none lost, none of another batch"
    assert again.keys() == read.keys()

    check_same_checkpoints(tmp_path, chaos.iterations)
    if chaos.then is not None:
        ranks, flags = chaos.then
        longer = Chaos(ranks, flags, chaos.iterations + 2, 0, 0)
        losses, others = (
            printed(run(longer, tmp_path / name)[1]) for name in ("unbroken", "killed")
        )
        assert losses == others
        assert sorted(losses) == [chaos.iterations + 1, chaos.iterations + 2]
        check_same_checkpoints(tmp_path, longer.iterations)


def check_same_checkpoints(root: Path, iterations: int) -> None:
    """Check that the killed job's last checkpoint is that of the unbroken job."""
    last = root / "killed" / "saved"
    assert folder.pointed_to(last) == iterations
    with pytest.raises(SystemExit) as ended:
        checkpoint_tool(["diff", str(last), str(root / "unbroken" / "saved")])
    assert ended.value.code == 0, "weights, moments and biases of experts, to the last bit"
