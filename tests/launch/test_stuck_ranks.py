"""A rank that is stuck is told from the ranks that wait for it, wherever they wait."""

import re
from pathlib import Path

import pytest
from launch.test_training_job import PATIENCE, ROOT, errors_of, started

pytestmark = pytest.mark.full

STUCK = """
import os, runpy, time
from megatron.runtime.executor import Executor

run = Executor._run

def run_or_stop(self, passes, item):
    if os.environ["RANK"] == "1" and (self._position.phase, str(item)) == ("iteration 2", "{item}"):
        time.sleep(3600)
    run(self, passes, item)

Executor._run = run_or_stop
runpy.run_path("{script}", run_name="__main__")
"""
"""Trains; rank 1 stops before one of its passes."""


@pytest.mark.parametrize(
    ("flags", "item", "waits", "collective"),
    [
        (
            "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 2",
            "F2",
            r"runs F2, waits for rank 1;",
            r"^collective \d+ of the tensor axis \(ranks 0-1\): rank 0 in \w+; rank 1 has not",
        ),
        ("", "S1", r"C1 1, waits for rank 1;", None),  # gloo moves it by messages
    ],
    ids=["tensor ranks in a pass", "a barrier of the vocabulary"],
)
def test_a_stuck_rank_is_named(
    flags: str, item: str, waits: str, collective: str | None, tmp_path: Path
) -> None:
    script = tmp_path / "stuck.py"
    text = STUCK.replace("{item}", item).replace("{script}", str(ROOT / "pretrain_gpt.py"))
    script.write_text(text)
    more = f"--train-iters 5 --lr 1e-3 --hang-seconds 5 {flags}"
    with started(None, more, script=script) as job:
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 1, output
    [error] = errors_of(output)
    assert re.match(rf"error: no rank .* s: rank 1 is stuck in iteration 2: runs {item};", error), (
        output
    )
    assert re.search(rf"^\[rank 0\] iteration 2: {waits}", output, re.MULTILINE), output
    if collective is None:
        assert "collective " not in output, output
    else:
        assert re.search(collective, output, re.MULTILINE), output
