"""Ranks that srun or mpirun has started name the one that dies, whichever, without C++."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness.job_guard import guarded
from launch.test_training_job import ITERATION_LINE, PATIENCE, ROOT, training_flags


@contextmanager
def ranks_by_hand(size: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A job without torchrun: only the variables tell a rank its place. Each writes a file."""
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    job = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    job |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
    flags = f"--pipeline-model-parallel-size {size} --num-layers {size} --train-iters 1000000"
    with ExitStack() as stack:
        ranks = []
        for rank in range(size):
            out = stack.enter_context((folder / str(rank)).open("w"))
            process = subprocess.Popen(
                [sys.executable, *training_flags(None, f"{flags} --lr 1e-3")],
                env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.enter_context(guarded(process))
            ranks.append(process)
        yield ranks


@pytest.mark.full
@pytest.mark.parametrize(("size", "victim"), [(2, 0), (4, 0), (4, 2)])
def test_a_rank_that_dies_is_named_without_torchrun(size: int, victim: int, tmp_path: Path) -> None:
    with ranks_by_hand(size, tmp_path) as ranks:
        end = time.monotonic() + PATIENCE
        while not any(map(ITERATION_LINE.search, map(Path.read_text, tmp_path.iterdir()))):
            assert time.monotonic() < end
            time.sleep(0.2)
        ranks[victim].kill()
        others = [rank for rank in range(size) if rank != victim]
        assert [ranks[rank].wait(PATIENCE) for rank in others] == [1] * len(others)
    said = [(tmp_path / str(rank)).read_text() for rank in others]
    told = [line for text in said for line in text.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, said
    assert told[0].startswith(f"error: rank {victim} was lost: ")
    assert not any("frame #" in text or "Traceback" in text for text in said), said
