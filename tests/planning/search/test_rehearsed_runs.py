"""A run that a rehearsal has looked at is known as if it had been looked at here."""

import sys
import time

import pytest

from megatron.planning.known import Known
from megatron.planning.search.runs import Runs
from megatron.run.line import Line
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import GPUS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork safely")

WORDS = """--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256
    --max-position-embeddings 256 --vocab-size 8000 --attention-dropout 0 --hidden-dropout 0 --bf16
    --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8 --train-iters 1
    --lr 1 --dry-run --dry-run-gpu H100"""
LINE = Line.of(WORDS.split(), 2)


def estimated(processes: int, *, rehearses: bool = False) -> tuple[Known, float]:
    """Return what is known of the run, and the seconds of work that were counted."""
    watch = Watch()
    runs = Runs(GPUS["H100"], watch, processes=processes)
    try:
        if rehearses:
            runs.rehearse(lambda: runs.estimate(LINE))
            time.sleep(1)  # this process is busy
        return runs.estimate(LINE), watch.worked
    finally:
        runs.close()


def test_known_figures_and_counted_work_do_not_depend_on_who_looks() -> None:
    known, worked = estimated(1)
    assert worked > 0
    for other, its in (estimated(2), estimated(2, rehearses=True)):
        assert other == known
        assert its == pytest.approx(worked)
