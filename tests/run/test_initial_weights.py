"""What draws the initial weights: the flag, and the note where it changes nothing."""

import pytest
import torch

from megatron.run.command_line import read
from megatron.run.run_config import resolve

MOCK = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 10 --mock-data --vocab-size 99"
)


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_the_cpu_draws_for_gpus_if_asked_to(
    given: bool, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(has_gpu))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    flags = f"{MOCK} {'--use-cpu-initialization' if given else ''}"
    found = read(flags.split(), world_size=1)
    assert not found.mistakes
    assert resolve(found.flags).train.use_cpu_initialization == given
    told = [note for note in found.notes if note.startswith("--use-cpu-initialization")]
    idle = ["--use-cpu-initialization changes nothing: ranks on CPUs draw their weights there"]
    assert told == (idle if given and not has_gpu else [])
