"""Two ranks on CUDA, over NCCL, train as one does; one GPU is enough for both.

No host waits for its device within a schedule, and no device memory grows: see
``tools/gpu_sections/watched_job.py``.
"""

from itertools import pairwise
from pathlib import Path

import pytest
from cuda_path import needs_gpus

from megatron.simulator.timeline_file import load_timeline
from tools.gpu_sections.ranks import train

pytestmark = needs_gpus


def losses(corpus: Path, ranks: int, flags: str, device: str = "cuda") -> list[float]:
    """Losses of ten iterations, every rank on the first GPU."""
    data = f"--data-path {corpus} --tokenizer-type NullTokenizer --vocab-size 63 --split 1,0,0"
    whole = f"--pipeline-model-parallel-size {ranks} {flags}"
    return train(whole, ranks, device, 300, 10, data=data, strict=True).losses


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
    expected = losses(corpus, 1, "", "cpu")
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
