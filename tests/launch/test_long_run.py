"""What ends a long run, or does not: signals, the clock, lost and stopped ranks, restarts."""

import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from socket import create_connection, socket

import pytest
from launch.test_training_job import (
    ITERATION_LINE,
    PATIENCE,
    errors_of,
    rank_process,
    started,
)

from megatron.checkpoint import folder

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not Path("/proc/self/environ").exists(), reason="finds ranks by /proc: Linux"
    ),
]

ENDLESS = "--train-iters 100000 --lr 1e-3"


def until(job: subprocess.Popen[str], iteration: int) -> str:
    """Read what a job prints up to the line of an iteration, or a later one."""
    assert job.stdout is not None
    read = []
    for line in job.stdout:
        read.append(line)
        found = ITERATION_LINE.search(line)
        if found and int(found["iteration"]) >= iteration:
            return "".join(read)
    raise AssertionError("".join(read))


def losses(output: str) -> dict[int, str]:
    """The losses of all iterations; of one that was printed twice the last."""
    return {int(found["iteration"]): found["loss"] for found in ITERATION_LINE.finditer(output)}


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only its exit status."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    """Whether processes end within the patience."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and any(map(is_running, pids)):
        time.sleep(0.1)
    return not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("number", "saves"),
    [
        (signal.SIGTERM, True),
        (signal.SIGUSR1, False),
    ],
)
def test_a_signal_to_one_rank_saves_and_ends_the_job_well(
    number: signal.Signals, saves: bool, tmp_path: Path
) -> None:
    save = f" --save {tmp_path}" if saves else ""
    with started(None, f"{ENDLESS} --exit-signal-handler{save}") as job:
        begin = until(job, 2)
        os.kill(rank_process(job.pid, 1), number)
        output = begin + job.communicate(timeout=PATIENCE)[0]
    assert job.returncode == 0, output
    [last] = re.findall(rf"exiting at iteration (\d+) after {number.name} .*", output)
    assert int(last) == max(losses(output))
    if saves:
        assert folder.candidates(tmp_path) == [int(last)]
    else:
        assert "nothing is saved" in output


def test_the_time_is_over(tmp_path: Path) -> None:
    flags = f"{ENDLESS} --exit-duration-in-mins 0.01 --save {tmp_path}"
    with started(None, flags) as job:
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    [last] = re.findall(r"exiting at iteration (\d+) after 0.01 minutes", output)
    assert folder.candidates(tmp_path) == [int(last)]


def test_a_stopped_rank_is_named_by_the_other() -> None:
    """A stopped process does not hear SIGTERM: torchrun would wait for it for half a minute."""
    with started(None, f"{ENDLESS} --hang-seconds 5") as job:
        begin = until(job, 2)
        other, stopped = (rank_process(job.pid, rank) for rank in range(2))
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert gone([other])
        finally:
            os.kill(stopped, signal.SIGKILL)
        output = begin + job.communicate(timeout=PATIENCE)[0]
    assert job.returncode == 1, output
    [error] = errors_of(output)
    assert error.startswith("error: rank 1 was lost"), output
    assert re.search(r"^\[rank 0\] iteration \d+.*last finished pass", output, re.MULTILINE)
    assert re.search(r"^\[rank 1\] no answer", output, re.MULTILINE)


@pytest.mark.parametrize("guarded", [True, False])
def test_no_rank_outlives_a_killed_torchrun(guarded: bool, tmp_path: Path) -> None:
    """With a handler of signals they save, though the store has died with torchrun."""
    more = f" --exit-signal-handler --save {tmp_path}" if guarded else ""
    with started(None, ENDLESS + more) as job:
        until(job, 2)
        ranks = [rank_process(job.pid, rank) for rank in range(2)]
        os.kill(job.pid, signal.SIGKILL)
        assert gone(ranks)
    assert bool(folder.candidates(tmp_path)) == guarded


def test_a_restarted_job_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """Losses are those of the unbroken run, to the last digit."""
    length = "--train-iters 12 --lr 1e-3 --exit-signal-handler"
    with started(None, length) as job:
        unbroken, _ = job.communicate(timeout=PATIENCE)
    saving = f"--save {tmp_path} --load {tmp_path} --save-interval 2"
    with started(None, f"{length} {saving}", launcher="--max-restarts 1") as job:
        begin = until(job, 5)
        os.kill(rank_process(job.pid, 1), signal.SIGKILL)
        output = begin + job.communicate(timeout=PATIENCE)[0]
    assert job.returncode == 0, output
    assert re.search(r"loaded .*: iteration \d+", output), output
    assert losses(output) == losses(unbroken)
    assert "Traceback" not in output


@pytest.mark.parametrize("restarts", [0, 1])
def test_two_machines_tell_who_was_lost_or_restart_together(restarts: int, tmp_path: Path) -> None:
    """Each has its torchrun, of which only one sees that its rank has died."""
    with socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launcher = (
        f"--nnodes 2 --nproc-per-node 1 --rdzv-endpoint localhost:{port} --rdzv-id two "
        f"--max-restarts {restarts}"
    )
    flags = f"--train-iters {20 if restarts else 100000} --lr 1e-3 --save {tmp_path} --load "
    flags += f"{tmp_path} --save-interval 2"
    with started(None, flags, launcher=launcher) as host:
        wait_for(port)
        with started(None, flags, launcher=launcher) as guest:
            jobs = {number_of_rank(job): job for job in (host, guest)}
            lost = number_of_rank(guest)
            begin = until(jobs[0], 3)
            os.kill(rank_process(guest.pid, lost), signal.SIGKILL)
            with ThreadPoolExecutor(2) as threads:
                ends = list(threads.map(lambda r: jobs[r].communicate(timeout=PATIENCE)[0], (0, 1)))
    output = begin + ends[0]
    if restarts:
        assert [host.returncode, guest.returncode] == [0, 0], ends
        assert max(losses(output)) == 20
        assert re.search(r"loaded .*: iteration \d+", output), output
    else:
        assert [host.returncode, guest.returncode] == [1, 1], ends
        [error] = errors_of(ends[1 - lost])
        assert error.startswith(f"error: rank {lost} was lost"), ends


def wait_for(port: int) -> None:
    """Wait until somebody listens: the torchrun that keeps the store must outlive the other."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with suppress(OSError), create_connection(("localhost", port), timeout=1):
            return
        time.sleep(0.1)


def number_of_rank(torchrun: subprocess.Popen[str]) -> int:
    """The rank that a torchrun of one rank has started, as soon as it has."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for rank in range(2):
            with suppress(LookupError, OSError):
                rank_process(torchrun.pid, rank)
                return rank
        time.sleep(0.1)
    raise AssertionError("no rank was started")
