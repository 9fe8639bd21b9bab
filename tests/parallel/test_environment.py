"""What launchers say is checked; NCCL's environment is there before the driver and stays."""

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
from megatron.parallel.environment import (
    ALLOCATOR_VARIABLES,
    GROWING_SEGMENTS,
    NCCL_ENVIRONMENT,
    Launched,
    launched,
    missing_for_meeting,
    set_nccl_environment,
)
from megatron.parallel.settings import DeviceSettings
from megatron.training.connect import connect
from megatron.training.rendezvous import Rendezvous


@pytest.fixture(autouse=True)
def none_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NCCL_ENVIRONMENT, *ALLOCATOR_VARIABLES):
        monkeypatch.setenv(name, "")  # so that the test's own is taken back
        monkeypatch.delenv(name)


def test_the_users_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    set_nccl_environment()
    expected = {**NCCL_ENVIRONMENT, "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert {name: os.environ[name] for name in NCCL_ENVIRONMENT} == expected


@pytest.mark.parametrize("name", [*ALLOCATOR_VARIABLES, None])
def test_memory_grows_in_segments_unless_the_user_says_otherwise(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(known, "max_split_size_mb:64" if known == name else "")
    set_nccl_environment()
    found = [os.environ[known] for known in ALLOCATOR_VARIABLES]
    if name is None:
        assert found == [GROWING_SEGMENTS, ""]
    else:
        assert found == ["max_split_size_mb:64" * (known == name) for known in ALLOCATOR_VARIABLES]


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
    config = replace(config, devices=DeviceSettings("cuda", backend))
    with pytest.raises(GpuAskedForError):
        connect(config, config.grid, Rendezvous(dist.HashStore(), 0, 2), 0, (0, 0))
    assert (os.environ.items() >= NCCL_ENVIRONMENT.items()) == (backend == "nccl")


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_a_process_of_its_own_is_a_job_of_one_rank() -> None:
    assert launched({}) == Launched(rank=0, world_size=1, local_rank=0)
    assert launched(dict.fromkeys(TORCHRUN, "")) == launched({})


def test_what_torchrun_sets_is_read() -> None:
    assert launched(TORCHRUN) == Launched(rank=5, world_size=8, local_rank=1)
    assert not list(missing_for_meeting(TORCHRUN))


@pytest.mark.parametrize(
    ("variable", "value", "wanted"),
    [
        *(
            (name, "two", " must be a whole number from ")
            for name in TORCHRUN
            if "ADDR" not in name
        ),
        *((name, "9" * 5000, " must be a whole number") for name in TORCHRUN if "ADDR" not in name),
        ("RANK", "8", "RANK=8: must be a whole number from 0 to 7, as WORLD_SIZE is 8; torchrun"),
        ("RANK", "-1", "RANK=-1: must be a whole number from 0 to 7"),
        ("RANK", " 1", "RANK= 1: must be"),
        ("RANK", "\u0661", "RANK=\u0661: must be"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0: must be a whole number from 1 to 1048576"),
        ("WORLD_SIZE", "1000000000", "WORLD_SIZE=1000000000: must be a whole number from 1 to"),
        (
            "LOCAL_RANK",
            "4",
            "LOCAL_RANK=4: must be a whole number from 0 to 3, as LOCAL_WORLD_SIZE",
        ),
        (
            "LOCAL_WORLD_SIZE",
            "9",
            "LOCAL_WORLD_SIZE=9: must be a whole number from 1 to 8, as WORLD",
        ),
        ("MASTER_PORT", "65536", "MASTER_PORT=65536: must be a whole number from 1 to 65535"),
        ("MASTER_PORT", "0", "MASTER_PORT=0: must be a whole number from 1 to 65535"),
    ],
)
def test_what_cannot_be_is_refused_with_the_variable_and_the_way_out(
    variable: str, value: str, wanted: str
) -> None:
    with pytest.raises(ValueError, match=r".+") as told:
        launched({**TORCHRUN, variable: value})
    [line] = [line for line in str(told.value).splitlines() if line.startswith(f"{variable}=")]
    assert wanted in line
    assert "torchrun sets it" in line


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"RANK=a: .*\nMASTER_PORT=b: "):
        launched({**TORCHRUN, "RANK": "a", "MASTER_PORT": "b"})


@pytest.mark.parametrize("gone", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_what_ranks_need_to_meet_is_named(gone: str) -> None:
    [line] = missing_for_meeting({**TORCHRUN, gone: ""})
    assert line.startswith(f"{gone} is not set, and WORLD_SIZE=8 ranks need it to meet: start")
