"""GPUs that PyTorch cannot use: the message names both CUDA versions and the way out.

The machine's ``nvidia-smi`` is a stand-in, and so is what PyTorch says of itself.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.run.command_line import parse
from megatron.run.gpu_driver import why_gpus_are_out_of_reach

BEFORE_610 = "| NVIDIA-SMI 535.104.05    Driver Version: 535.104.05   CUDA Version: 12.2     |"
SINCE_610 = "| NVIDIA-SMI 610.43.02     KMD Version: 610.43.02     CUDA UMD Version: 13.3     |"
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 999"
)

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a driver and a PyTorch that cannot use it."""

    def machine(banner: str = BEFORE_610, built_for: str | None = None, gpus: int = 2) -> None:
        listing = "; ".join(f"echo 'GPU {i}: NVIDIA H200'" for i in range(gpus)) or "exit 6"
        script = tmp_path / "nvidia-smi"
        script.write_text(
            f"#!/bin/sh\nif [ \"$1\" = -L ]; then {listing}; else echo '{banner}'; fi\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch, "__version__", f"2.13.0+{built_for or 'cpu'}")
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    return machine


def missing(parts: list[str]) -> list[str]:
    """Those of ``parts`` that the message lacks."""
    message = why_gpus_are_out_of_reach()
    assert message is not None
    return [part for part in parts if part not in message]


def test_a_cpu_build_is_told_to_be_replaced(install: Install) -> None:
    install(gpus=8)
    parts = ["8 GPU(s)", "driver for CUDA 12.2", "2.13.0+cpu (a CPU build)"]
    assert (
        missing([*parts, "a build for CUDA 12 ", "pip install --force-reinstall torch==2.13.0 "])
        == []
    )


def test_a_driver_older_than_the_build_is_told_both_ways(install: Install) -> None:
    install(built_for="13.0")
    parts = [
        "driver for CUDA 12.2",
        "built for CUDA 13.0",
        "update the driver to one for CUDA 13.0",
    ]
    assert missing([*parts, "a build for CUDA 12 "]) == []


@pytest.mark.parametrize(
    ("banner", "built_for", "driver"),
    [(SINCE_610, "13.0", "13.3"), (BEFORE_610, "12.8", "12.2"), ("garbled", "12.8", "unknown")],
)
def test_a_driver_that_should_do_is_left_to_pytorchs_own_words(
    banner: str,
    built_for: str,
    driver: str,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver runs what is built for its major version, and for those before."""

    def refuse() -> None:
        raise RuntimeError("CUDA unknown error\nmore")

    install(banner, built_for)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    assert missing([f"driver for CUDA {driver}", built_for, "it says 'CUDA unknown error'"]) == []


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_called_hidden(
    hidden: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert missing([f"CUDA_VISIBLE_DEVICES={hidden} hides them"]) == []


def test_a_machine_without_gpus_has_nothing_to_explain(install: Install, tmp_path: Path) -> None:
    install(gpus=0)
    assert why_gpus_are_out_of_reach() is None
    (tmp_path / "nvidia-smi").unlink()
    assert why_gpus_are_out_of_reach() is None


def test_the_message_is_the_error_of_device_cuda(install: Install) -> None:
    install()
    with pytest.raises(ValueError, match=r"--device cuda: .*CUDA 12\.2.*; or use --device cpu"):
        parse([*FLAGS.split(), "--device", "cuda"], world_size=1)
    install(gpus=0)
    with pytest.raises(ValueError, match=r"--device cuda: PyTorch finds no CUDA device here"):
        parse([*FLAGS.split(), "--device", "cuda"], world_size=1)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "16"}, ["srun gives each of the 8 tasks", "--gpu-bind=none"]),
        ({}, ["--nproc-per-node 8: this machine has 1 CUDA devices", "--device cpu"]),
    ],
)
def test_a_task_that_sees_one_gpu_of_several_is_told_the_way_out(
    variables: dict[str, str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    for name, value in {"LOCAL_WORLD_SIZE": "8", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words[0].split()[0]) as caught:
        parse(FLAGS.split(), 8)
    assert all(word in str(caught.value) for word in words)
