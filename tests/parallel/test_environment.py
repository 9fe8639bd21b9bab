"""NCCL's environment is there before the driver, and the user's own settings stay."""

import os
import sys
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from correctness.short_runs import Job as Run
from correctness.short_runs import Layout
from reference.plain_gpt import GPTOptions

import pretrain_gpt
from megatron.parallel.environment import NCCL_ENVIRONMENT, set_nccl_environment
from megatron.training.rendezvous import Rendezvous
from megatron.training.setup import connect


@pytest.fixture(autouse=True)
def none_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that the test's own is taken back
        monkeypatch.delenv(name)


def test_the_users_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    set_nccl_environment()
    expected = {**NCCL_ENVIRONMENT, "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    assert {name: os.environ[name] for name in NCCL_ENVIRONMENT} == expected


class GpuAskedForError(Exception):
    """Raised in place of the first question about GPUs, or their first use."""


def test_a_rank_has_set_it_before_it_asks_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> bool:
        raise GpuAskedForError

    for name in ("is_available", "device_count", "init", "set_device", "current_device"):
        monkeypatch.setattr(torch.cuda, name, ask)
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 63 "
        "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 1 "
        "--lr 1e-3 --data-path nothing --tokenizer-type NullTokenizer"
    )
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags.split()])
    with pytest.raises(GpuAskedForError):
        pretrain_gpt.main()
    assert os.environ.items() >= NCCL_ENVIRONMENT.items()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_whoever_connects_over_nccl_has_set_it(
    backend: Literal["nccl", "gloo"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def use_gpu(device: torch.device) -> None:
        raise GpuAskedForError

    monkeypatch.setattr(torch.cuda, "set_device", use_gpu)
    run = Run(GPTOptions(num_layers=2), micro_batch_size=1, microbatches=2, iterations=1)
    config = run.config(Layout(2, "vocab-2", "1f1b"), torch.float32).parallel
    config = replace(config, device="cuda", backend=backend)
    with pytest.raises(GpuAskedForError):
        connect(config, config.grid, Rendezvous(dist.HashStore(), 0, 2), 0, (0, 0))
    assert (os.environ.items() >= NCCL_ENVIRONMENT.items()) == (backend == "nccl")
